"""Typed configuration: the sections, their strict loading, and the effective config printed back."""
