"""The stages of a save and of a load, and the two graphs made of them."""
