"""Kills of a job with a memory tier, on hosts with networks of their own; ``__main__`` is the program."""
