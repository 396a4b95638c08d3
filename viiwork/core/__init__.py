"""Decisions: no I/O, no clock and no randomness of their own; `now` and `rng` come in as arguments."""
