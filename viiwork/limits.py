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
KV_STATE_MAX_BYTES = 256 * GIB  # one save-file; a larger claim is refused before anything is allocated
KV_TOKENS_MAX = (
    4 * 1024 * 1024
)  # tokens of one save-file; its cell list is read whole: 48 MiB of bytes at worst
KV_STREAMS_MAX = 256  # slots of one engine; llama.cpp's own limit of parallel sequences
KV_LAYERS_MAX = 1024  # cache layers of one state; the largest models have about 130. 16 KiB a plane list
KV_ROW_MAX_BYTES = 16 * MIB  # one row of one layer; real ones are 0.5-64 KiB
KV_CHUNK_BYTES = MIB  # payload of a DATA frame, unit of hashing; 128 KiB to 2 MiB measured alike
KV_CHUNK_MAX_BYTES = 4 * MIB  # largest chunk a peer may choose; times the ring = memory of one receive job
KV_RING_BUFFERS = 4  # chunks in flight between the two threads of a transfer: 4 MiB a job, 16 MiB at worst
KV_MESSAGE_MAX_BYTES = 256 * KIB  # any frame that is not DATA; a manifest of 1,024 layers is about 30 KiB
KV_CONTROL_MAX_BYTES = 128 * KIB  # one message between control and worker; below the kernel's socket buffer
KV_LOCAL_JOBS = 4  # renders and inspections at once in one worker; more wait for a thread
KV_JOBS_MAX = 16  # transfers at once in one worker; each has two threads and one ring: 256 MiB at worst
KV_REPLICAS_MAX = 4096  # committed replicas; about 20 KiB of facts each at worst, 80 MiB
KV_GRANT_MODELS_MAX = 64  # models one receive may offer
KV_HANDSHAKE_S = 5.0  # both proofs exchanged within this, or the socket is closed
KV_SILENCE_S = 8.0  # a peer that moves nothing for this long is gone; a LAN stall is far shorter
KV_JOB_DEADLINE_S = 600.0  # whole transfer: 250 MB at 0.5 MB/s; slower than that a cold prefill wins
KV_LINGER_S = 2.0  # after a refusal: time for the peer to read the reason before the socket closes
KV_DISK_RESERVE_BYTES = 64 * MIB  # left free on the replica folder's filesystem, for the engine's own save
KV_RESTART_MIN_S = 0.2  # pause before a died worker is started again; doubles up to the maximum
KV_RESTART_MAX_S = 30.0  # a worker that dies at once is tried twice a minute
KV_STABLE_S = 60.0  # a worker that lived this long starts again with the shortest pause
KV_LOG_LINE_MAX_BYTES = 4096  # a longer line of a worker's error output is cut

# -- node ------------------------------------------------------------------------------------------
