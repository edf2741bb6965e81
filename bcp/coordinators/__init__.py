"""How ranks agree: alone, in one process, over the torch Store."""
