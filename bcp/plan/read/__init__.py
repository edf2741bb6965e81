"""Planning a load: what a rank wants, where it lies, and who reads it (paper sec. 3.3, 4.1)."""
