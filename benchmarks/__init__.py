"""Numbers: ``python -m benchmarks.NAME [--quick] [--json FILE] [--check]``."""
