"""Decisions: pure functions and small tables. `now` and `rng` are arguments."""
