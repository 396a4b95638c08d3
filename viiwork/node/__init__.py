"""Wiring: start and stop order, periodic work, the owner of the mutable state."""
