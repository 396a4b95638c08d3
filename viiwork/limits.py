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
ENGINE_LINE_MAX_CHARS = 2048  # a longer log line is cut; 5 MB of dots without a newline cost 2 KiB
ENGINE_LAST_LINES = 50  # newest lines kept for a backend; 50 x 8 KiB escaped at worst = 400 KiB
ENGINE_VIEW_LINES = 20  # of these, how many a snapshot shows
ENGINE_LOG_LINES_PER_S = 50  # lines a backend may put into the node's log each second; the rest is counted
ENGINE_READ_BYTES = 256 * KIB  # one read of an engine's log pipe; bounds the time away from the event loop
ENGINE_ANSWER_MAX_BYTES = 8 * MIB  # /slots, /props, ...; a `slots` debug build adds whole prompts
ENGINE_HELP_MAX_BYTES = 1 * MIB  # `llama-server --help` is about 60 KiB
ENGINE_SLOTS_MAX = 4096  # slots believed from one engine; 4096 x about 200 B
ENGINE_STARTUP_TIMEOUT_S = 600.0  # loading a model from a slow disk; `models[].startup_timeout` overrides
ENGINE_QUICK_EXIT_S = 10.0  # an exit this soon before ready may be a lost race for the port: one free retry
ENGINE_STOP_GRACE_S = 5.0  # SIGTERM to SIGKILL when a backend is replaced
ENGINE_BUDGET_REFILL_S = 600.0  # continuous health that gives a backend its respawns back
ENGINE_LOAD_STALE_S = 3.0  # three missed load polls: occupancy is unknown, not zero
ENGINE_STALLS_MAX = (
    2  # requests without a byte, no success between: the engine answers /health but cannot serve
)
GGUF_HEADER_MAX_BYTES = 256 * MIB  # metadata and tensor table; the largest vocabularies make about 30 MiB
GGUF_STRING_MAX_BYTES = (
    16 * MIB
)  # one string value (a chat template is about 20 KiB); the only one held at a time
GGUF_TENSORS_MAX = 200_000  # entries of a tensor table; 200,000 offsets = 7 MiB
GGUF_SHARDS_MAX = 10_000  # `-00001-of-NNNNN`: files looked for

# -- mesh ------------------------------------------------------------------------------------------

# -- kv --------------------------------------------------------------------------------------------

# -- node ------------------------------------------------------------------------------------------
