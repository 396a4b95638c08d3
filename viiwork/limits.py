"""Every number that bounds something, with its unit, its reason and what it costs at worst."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# -- api -------------------------------------------------------------------------------------------

# -- core ------------------------------------------------------------------------------------------
SESSIONS_MAX = 4096  # remembered sessions; about 400 B each, 2 MiB. Beyond it the oldest is forgotten
SESSION_KEY_MAX_BYTES = 1024  # a longer header value is hashed from its first 1,024 bytes

# -- config ----------------------------------------------------------------------------------------

# -- engine ----------------------------------------------------------------------------------------

# -- mesh ------------------------------------------------------------------------------------------

# -- kv --------------------------------------------------------------------------------------------

# -- node ------------------------------------------------------------------------------------------
RETRIED_REQUESTS_MAX = 4096  # requests whose queue time is remembered for their next try; 100 B each, 0.4 MiB
