"""The storage benchmark: bcp's backends beside plain clients; run it by ``python -m benchmarks.storage``."""
