"""Reports, progress bars and log lines, made of events."""
