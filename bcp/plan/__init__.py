"""Boxes, shard tables, the layout, and plans of saves and loads. Pure functions over numpy; no I/O, no torch."""
