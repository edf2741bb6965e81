"""A run whose ranks are killed again and again, judged from outside."""
