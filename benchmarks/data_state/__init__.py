"""How long the state of data takes to gather, to store and to move to other readers."""
