"""Asynchronous, resharding checkpoints for large foundation model training."""
