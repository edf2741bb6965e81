"""Planning a save: what all ranks hold, who writes what of it, and where to (paper sec. 3.3, 4.1)."""
