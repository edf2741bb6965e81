"""Read a checkpoint: open it, check it, take parts of it. No job, no ranks that agree; a load stands on it."""
