"""Compiled code from csrc/; there is no Python fallback."""
