"""Stages as plain async functions, joined into graphs with bounded queues and one byte budget."""
