"""Formats: bytes to values and back, without I/O."""
