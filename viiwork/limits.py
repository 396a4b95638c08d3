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
REPLICAS_MAX = 1024  # replicas known by session; about 500 B each, 0.5 MiB (their bytes: kv_share.memory)
KV_TRANSFERS_SHOWN = 20  # newest transfers in /v1/status; about 400 B each
KV_PUSHES_AT_ONCE = 4  # states on their way out; each has one save-file in the engine's folder
KV_RECEIVES_AT_ONCE = 8  # states on their way in; each takes one thread pair and its buffers in the worker
KV_PROBE_SAVE_S = 30.0  # an engine that cannot save one token in this time does not take part
KV_SAVE_S = 10.0  # longest save; the connection is then closed, which cancels it
KV_SLOT_SETTLE_S = 2.0  # how long a slot may still be processing after its last byte was relayed
KV_IMPORT_MIN_S = 0.5  # an import is given this long, however fast the model prefills
KV_IMPORT_MAX_S = 30.0  # longest import, and its bound while the model's prefill time is not measured
KV_NO_REUSE_MAX = 2  # restores in a row without any reuse before a model stops being shared
RETRIED_REQUESTS_MAX = 4096  # requests whose queue time is remembered for their next try; 100 B each, 0.4 MiB
