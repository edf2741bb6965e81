"""Trainers of others are killed at file events of their saves, and resumed."""
