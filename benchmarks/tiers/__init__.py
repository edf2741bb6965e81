"""What the memory tier costs, and how soon it brings a job back."""
