"""HTTP: the inference relay and the admin routes; thin, no decisions."""
