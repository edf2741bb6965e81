"""Runs: a training job that comes back after every interruption (resume, periodic saves, retention, preemption)."""
