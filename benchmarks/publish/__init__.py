"""What a publication of weights costs, and whether it survives kills: see ``__main__``."""
