"""The process's own means: event loop, threads, memory and devices."""
