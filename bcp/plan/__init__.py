"""What goes where: boxes, shard tables, write plans, read plans. Pure functions over numpy; no I/O, no torch."""
