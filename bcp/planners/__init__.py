"""One planner per training framework."""
