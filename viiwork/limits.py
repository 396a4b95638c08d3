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
CONFIG_FILE_MAX_BYTES = MIB  # 256 models with long args are 200 KiB; held once while it is read
CONFIG_MAX_DEPTH = 16  # the deepest key is 5 levels down; keeps recursion over the tree shallow
CONFIG_MAX_NODES = 50_000  # of the tree, every alias written out; at most about 15 MiB, freed after loading
CONFIG_ECHO_MAX_CHARS = 48  # of a wrong value shown in an error, which stays one line of a terminal
DURATION_MAX_S = 30 * 86_400  # a longer one is a slip of the unit; a float holds its microseconds exactly
INTERVAL_MIN_S = 0.01  # for repeated work: 100 rounds a second cost under 1 % of a core, less would spin
SIZE_MAX_BYTES = 1 << 50  # 1 PiB, a slip of the unit beyond it
COUNT_MAX = 1_000_000  # queue and history lengths: 264 B an event is 264 MB, all an operator can ask for
MODELS_MAX = 256  # entries of `models`; their capacity report stays under its 1 MiB
MODEL_NAME_MAX_BYTES = 512  # room for long repository names; 256 of them are 128 KiB of a capacity report
NODE_NAME_MAX_BYTES = 255  # a host name's length; a node's name rides in every gossip message
SEEDS_MAX = 256  # addresses tried each `mesh.rejoin_interval`, eight at a time
PARALLEL_MAX = 256  # slots a backend, llama.cpp's own limit of sequences
CONTEXT_MAX_TOKENS = (1 << 31) - 1  # tokens of all slots of a backend; llama.cpp counts them in 31 bits
GPU_INDEX_MAX = 1023  # host indices; far beyond any machine, and bounds the pinning environment
THREADS_MAX = 1024  # beyond it llama.cpp spends its time in barriers
RAM_CACHE_MAX_MIB = 1 << 24  # 16 TiB, a slip of the unit beyond it
KV_REPLICAS_MAX = 16  # peers that hold a copy of a session
KV_WORKERS_MAX = 16  # processes that move KV bytes; two fill 10 Gb/s

# -- engine ----------------------------------------------------------------------------------------

# -- mesh ------------------------------------------------------------------------------------------

# -- kv --------------------------------------------------------------------------------------------

# -- node ------------------------------------------------------------------------------------------
