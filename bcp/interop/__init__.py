"""Names and files of other libraries: layouts of their models, and their checkpoints by reference."""
