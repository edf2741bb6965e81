"""The engine that turns the states of a rank into a table of shards, for every framework."""
