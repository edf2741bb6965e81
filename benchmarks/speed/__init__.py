"""How fast saving and loading is, beside other libraries and beside what the machine can do."""
