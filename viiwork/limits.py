"""Every number that bounds something, with its unit, its reason and what it costs at worst."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# -- api -------------------------------------------------------------------------------------------
BODY_MAX_BYTES = 32 * MIB  # of one request; 128k tokens of text are about 0.5 MiB, the rest is for images
BODIES_MAX_BYTES = 512 * MIB  # of all requests being read or run; beyond it new ones are refused with 503
HEADER_READ_S = 10.0  # for a request's head; a slow sender holds a socket and 64 KiB for this long
LINGER_S = 2.0  # a refused body is read away, so that the client sees the answer and not a reset
IDLE_S = 120.0  # a kept-alive client connection without a request
BODY_SILENCE_S = 60.0  # between two pieces of a request body; no slot is held meanwhile
WRITE_STALL_S = 120.0  # a client that takes no byte for this long is gone; holds a slot and 128 KiB
CONNECTIONS_MAX = 2048  # of clients and peers; about 20 KiB each when idle, 40 MiB
HEADER_FIELD_MAX_BYTES = 16 * KIB  # one header line or the request line; with HEADERS_MAX 2 MiB a head
HEADERS_MAX = 128  # header lines of one message
NAMES_REMEMBERED = 256  # header names judged before, of each direction; of 16 KiB each 8 MiB
MODEL_NAME_MAX_CHARS = 1024  # no engine has a longer one; error messages repeat it
SSE_LINE_MAX_BYTES = 256 * KIB  # the scanner's memory per stream; 256 streams with huge events are 64 MiB
SSE_TAIL_BYTES = 16 * KIB  # kept of a longer line; token counts stand at the end
ANSWER_HEAD_MAX_BYTES = 64 * KIB  # of an engine or peer; one is held per exchange
ANSWER_TAIL_BYTES = 256 * KIB  # kept of a non-streamed answer to read its token counts; as above
CONTROL_BODY_MAX_BYTES = MIB  # of a control write; the largest names 256 models
CONTROL_BODY_S = 5.0  # for it to come
CONTROLS_AT_ONCE = 16  # control writes being read, because no proof can be checked before: 16 MiB at worst
PREFLIGHT_AGE_S = 600  # a browser asks again whether a page may; a changed list works after that
CONNECT_S = 3.0  # to an engine or a peer; one lost SYN is resent after 1 s
COMMENT_EVERY_S = 10.0  # into a silent stream; clients and proxies that give up do so after 30 s or more
ROUTE_ATTEMPTS_MAX = 16  # routes tried for one request; the dispatcher normally ends it long before
UPSTREAM_IDLE_S = 4.0  # a kept-alive connection to an engine; llama.cpp closes them after 5 s
UPSTREAM_IDLE_MAX = 256  # such connections kept in all, about 20 KiB each
REFUSAL_DRAIN_BYTES = 64 * KIB  # read of a refusal so that its connection can be used again
REFUSAL_DRAIN_S = 1.0  # and for how long
CHANNEL_OFFER_MAX_BYTES = 64 * KIB  # of a kv channel's opening request
CHANNEL_OFFER_S = 5.0  # for it to come
PEER_DEAD_S = 30.0  # a peer whose kernel acknowledges nothing for this long broke off

# -- core ------------------------------------------------------------------------------------------
NODE_NAME_MAX_BYTES = 64  # kinship's own limit for member names; a longer one could join no mesh
SESSIONS_MAX = 4096  # remembered sessions; about 400 B each, 2 MiB. Beyond it the oldest is forgotten
SESSION_KEY_MAX_BYTES = 1024  # a longer header value is hashed from its first 1,024 bytes
ACTIVITY_FOLLOWERS_MAX = 16  # of one node's activity; each buffers at most 32 events of 264 B
ACTIVITY_BUFFER_EVENTS = 32  # a follower that is further behind skips events, it must not hold the node up
ACTIVITY_REPLAY_MS = 30_000  # of the past, shown to a new follower: what an operator still wonders about
LOG_VALUE_MAX_CHARS = 200  # of one value of a log line that may come from a client or a peer
ALIAS_NAME_MAX_CHARS = 64  # of an alias; it stands in headers, URLs and tables
ALIASES_MAX = 256  # live aliases an operator can make; listed with /v1/models each time a client asks
ALIAS_NAMES_MAX = 1024  # with removed ones, also those other members made; 12 KB each at worst, 12 MB
ALIAS_SETTINGS_MAX = 11  # of one alias: the present one and ten before it; 1 KB each at worst
ALIAS_SETTING_MAX_BYTES = 700  # its models; a write with all else stays under 1,000, which fit one datagram
ALIAS_VER_MAX = 1 << 53  # a whole number in every JSON reader; also bounds time stamps
ALIAS_CLOCK_SKEW_MS = 86_400_000  # a write from further ahead would keep every later one out
ALIAS_TOMBSTONE_KEPT_MS = 30 * 86_400_000  # a node that was off for longer brings removed aliases back
SESSION_FIELD_MAX_BYTES = 64 * KIB  # a longer `metadata` or `prompt_cache_key` names no session
CHAIN_LINKS_MAX = 64  # links of one request: a turn adds a few messages; 64 are 6 KiB and 0.1 ms of hashing
SESSION_HALF_LIFE_S = (
    300.0  # an idle session's odds of coming back halve; agents' tools take seconds to minutes
)
RAM_MISSES_MAX = 3  # sessions in a row an engine's RAM cache did not give back before it is believed no more
RAM_DEFAULT_MIB = 8192  # llama.cpp's own size of that cache
RAM_TOKEN_BYTES = (
    128 * KIB
)  # of a state whose layout is not known: 8B models and larger ones with few KV heads
CONVERSATION_TIPS_MAX = 8  # turns of a conversation an edit may go back to; 100 B each, 3 MiB in all
HOLDINGS_MAX = 256  # conversations a node tells of; 500 B each in memory, 128 KiB a member
HOLDINGS_ASK_S = 0.1  # for peers to say what they hold; reading an unknown conversation anew takes seconds
HOLDINGS_OLD_S = (
    0.2  # a peer asked more lately is not asked again for that: five extra polls a second at most
)
HOLDINGS_MAX_BYTES = 32 * KIB  # of them in one capacity report; sent only when they changed
PROMPT_BYTES_PER_TOKEN = 4  # of text, code and markup alike, where nothing was measured
CHAIN_BLOCK_BYTES = KIB  # of a prompt without messages: 62 blocks back is more than a turn adds

# -- routing ---------------------------------------------------------------------------------------
BAND_DEFAULT = 1.25  # hosts this close to the best TTFT are equals; 1.0 would herd all requests onto one
EXPLORE_DEFAULT = 0.05  # one request in twenty finds out about a host nobody measured
IMPORT_GUESS_SHARE = 0.25  # of reading: restoring at a node that does not tell; measured ones are at 0.05-0.2
HOLD_MIN_MS = 20.0  # a shorter wait for a warm home is not worth a timer, let alone a round trip
WAIT_MAX_MS = 600_000  # longest wait a forward may ask for; the executor's own queue_timeout is the real end
CANDIDATES_MAX = 32  # hosts compared in one decision; about 150 B each in every receipt
PREFER_MAX = 8  # names in `?prefer=`
PLACE_NAME_MAX_CHARS = 253  # of a host in `?host=` and `?prefer=`, as long as a DNS name
BYTES_PER_TOKEN = 4.0  # of a request body, until a model's answers tell better
BYTES_PER_TOKEN_MIN = 1.0  # one byte a token is the worst any vocabulary does
BYTES_PER_TOKEN_MAX = 16.0  # beyond it the body is pictures, not text
BYTES_PER_TOKEN_ALPHA = 0.1  # weight of the newest answer; the last twenty or so matter
ESTIMATE_TOKENS_MIN = 64  # of a shorter prompt the JSON around it says more than its text
FAILURES_BEFORE_BACKOFF = 2  # in a row; one may be an accident
FAILING_BACKOFF_S = 2.0  # first time behind all others: two capacity reports
FAILING_BACKOFF_MAX_S = 30.0  # two trials a minute are noticed by nobody and soon enough
FAILURES_MAX = 4096  # (node, model) pairs remembered; about 200 B each, 0.8 MiB
RECEIPTS_MAX = (
    2048  # decided requests kept for /v1/why; about 1 KiB each, with 32 hosts 7 KiB: 14 MiB at worst
)
RECEIPT_STEPS_MAX = 4  # decisions kept of one request, the first and the newest
PERF_FILE_MAX_BYTES = MIB  # 256 models with the longest names are 160 KiB
PERF_LOOK_S = 10.0  # how often it is looked whether the speed changed
PERF_SAVE_S = 600.0  # changes below the rounding are written this seldom: an SSD's life is not for them
TRACE_FILE_MAX_BYTES = 64 * MIB  # then it becomes FILE.1; two of them, about 150,000 decisions each
TRACE_LINES_MAX = 4096  # waiting to be written; 2 KiB each at worst, 8 MiB; more are dropped and counted
TRACE_FLUSH_S = 0.5  # between two writes
TRACE_LINE_MAX_BYTES = 64 * KIB  # 32 candidates with the longest names are 12 KiB
SCORE_BUCKET_S = 60.0  # of turns that are forgotten together
SCORE_BUCKETS = 10  # ten minutes: long enough for a quiet node, short enough to follow a hot card
SCORE_BUCKET_SAMPLES_MAX = 256  # of each bucket, the newest; 2,560 of 100 B are 256 KiB a model at worst
SCORE_BIG_TOKENS = 512  # from here on prefill is most of the TTFT; below it the overhead is
SCORE_ROUNDS = 3  # of the alternating medians; further ones change less than the rounding
SCORE_SMALL_SAMPLES_MIN = 3  # before a window's short prompts overrule the baseline's overhead
SCORE_FIRST_SAMPLES = 3  # long prompts before the first score; the median of three bears one odd one
SCORE_BASELINE_SAMPLES = 5  # long prompts in a window that make it the new baseline
SCORE_RATE_MIN_MS = 1.0  # per 1,000 tokens; nothing reads a million tokens a second, so it is no measurement
SCORE_REFRESH_S = 1.0  # as often as anybody polls; 2,560 samples take 2 ms
QUEUE_LATE_S = 1.0  # a waiter this long past its time slept with the machine: answered, not run

# -- config ----------------------------------------------------------------------------------------
CONFIG_FILE_MAX_BYTES = MIB  # 256 models with long args are 200 KiB; held once while it is read
CONFIG_MAX_DEPTH = 16  # the deepest key is 5 levels down; keeps recursion over the tree shallow
CONFIG_MAX_NODES = 50_000  # of the tree, every alias written out; at most about 15 MiB, freed after loading
CONFIG_ECHO_MAX_CHARS = 48  # of a wrong value shown in an error, which stays one line of a terminal
DURATION_MAX_S = 30 * 86_400  # a longer one is a slip of the unit; a float holds its microseconds exactly
CORS_ORIGINS_MAX = 256  # entries of `api.cors.allow_origins`; about 300 B each
INTERVAL_MIN_S = 0.01  # for repeated work: 100 rounds a second cost under 1 % of a core, less would spin
SIZE_MAX_BYTES = 1 << 50  # 1 PiB, a slip of the unit beyond it
COUNT_MAX = 1_000_000  # queue and history lengths: 264 B an event is 264 MB, all an operator can ask for
MODELS_MAX = 256  # entries of `models`; their capacity report stays under its 1 MiB
MODEL_NAME_MAX_BYTES = 512  # room for long repository names; 256 of them are 128 KiB of a capacity report
SEEDS_MAX = 256  # addresses tried each `mesh.rejoin_interval`, eight at a time
PARALLEL_MAX = 256  # slots a backend, llama.cpp's own limit of sequences
CONTEXT_MAX_TOKENS = (1 << 31) - 1  # tokens of all slots of a backend; llama.cpp counts them in 31 bits
API_KEY_MAX_CHARS = 4096  # of an external server; it is one header line there, and JWTs are about 1 KiB
URL_MAX_CHARS = 2048  # of an external server
GPU_INDEX_MAX = 1023  # host indices; far beyond any machine, and bounds the pinning environment
THREADS_MAX = 1024  # beyond it llama.cpp spends its time in barriers
RAM_CACHE_MAX_MIB = 1 << 24  # 16 TiB, a slip of the unit beyond it
KV_COPIES_MAX = 16  # peers that hold a copy of a session

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
ENGINE_STALLS_MAX = 2  # lost requests without a success between, whatever one token in between said
ENGINE_PROOF_S = 10.0  # for one token of an idle engine that lost a request; it takes one well under a second
EXTERNAL_POLL_S = 1.0  # between probes of an external engine that runs requests; else `health.interval`
EXTERNAL_PROBE_S = 1.0  # for its answer; a later one takes it out of routing until the next
EXTERNAL_MODELS_MAX = 4096  # entries believed of its /v1/models; hosted gateways list some hundreds
GGUF_HEADER_MAX_BYTES = 256 * MIB  # metadata and tensor table; the largest vocabularies make about 30 MiB
GGUF_STRING_MAX_BYTES = (
    16 * MIB
)  # one string value (a chat template is about 20 KiB); the only one held at a time
GGUF_TENSORS_MAX = 200_000  # entries of a tensor table; 200,000 offsets = 7 MiB
GGUF_SHARDS_MAX = 10_000  # `-00001-of-NNNNN`: files looked for

# -- mesh ------------------------------------------------------------------------------------------
MEMBERS_MAX = 1024  # members kinship holds; 1,024 polls a second is more than one loop should do anyway
DEPARTED_MAX = 256  # departed members still listed; about 300 B each
LOST_MODEL_KEPT_S = 300.0  # a model whose last node went is "nobody serves it now" so long, then "unknown"
DEPARTED_KEPT_S = 24 * 3600.0  # an operator finds yesterday's machine; longer would list old names for ever
NAME_GRACE_S = 60.0  # a process younger than this gives up a contested name; the older one is the known one
LEAVE_TIMEOUT_S = 5.0  # news of a leave spreads in well under a second; a lost network must not hold the stop
MESH_PROBLEMS_MAX = 32  # problems shown in /v1/status; one line of at most 300 characters each
MESH_PROBLEM_KEPT_S = 300.0  # a problem not seen for so long is over
LOG_REPEAT_S = 60.0  # the same log line at most once a minute
LOG_KEYS_MAX = 256  # different lines remembered for that; about 200 B each
JOINS_AT_ONCE = 8  # joins in flight; a long seed list must not open hundreds of connections
SEED_CANDIDATES_MAX = 1024  # addresses tried in one round of discovery
DISCOVERY_TIMEOUT_S = 10.0  # a silent source of addresses must not hold the others' round
PEER_CONNECT_S = 0.5  # a peer is in the same building or tailnet; slower is as good as down
PEER_KEEPALIVE_S = 4.0  # engines and nodes close idle connections after 5 s; reuse must end before that
CAPACITY_BODY_MAX_BYTES = 1 * MIB  # body of one capacity report; held while it is decoded
CAPACITY_BODY_KEPT_BYTES = (
    64 * KIB
)  # of a member's last body, so that the same one is not decoded again; 64 MiB
CAPACITY_MODELS_MAX = 1024  # models in one report; about 400 B each, 400 KiB a member
CAPACITY_COUNT_MAX = 1_000_000  # slots, busy, queued, backends; a sum over MEMBERS_MAX stays well in 64 bits
CAPACITY_CTX_MAX_TOKENS = 2**31 - 1  # the engine counts tokens in 32 bits
CAPACITY_MILLIS_MAX = 1e9  # 11 days to the first token; a longer one is a fault of its sender
CAPACITY_TEXT_MAX_CHARS = 256  # version, engine, fingerprints
RTT_ALPHA = 0.3  # weight of the newest round trip; the last seven or so matter
SIGNATURE_SKEW_S = 120  # clocks without NTP drift seconds a week; wider lengthens the nonce cache
NONCE_KEPT_S = 240.0  # a request dated +120 s stays valid for 240 s; a shorter memory would let it in twice
NONCE_CACHE_MAX = 262_144  # 1,090 signed requests a second for 240 s; about 130 B each, 34 MB at worst
SIGNER_MAX_CHARS = 300  # `viiwork-cli@<host name of 253>`
CLAIM_LOG_MAX = 256  # names of unproven forwards remembered for once-a-minute logging; 150 B each
CHANNEL_HEAD_MAX_BYTES = 16 * KIB  # head of the answer to an upgrade; ours are under 1 KiB
CHANNEL_ERROR_MAX_BYTES = 4 * KIB  # body of a refused upgrade that is read for its message
CHANNEL_HEAD_TIMEOUT_S = 5.0  # the peer only checks a signature before it answers
TAILSCALE_BODY_MAX_BYTES = 16 * MIB  # tailscaled's status lists every device; 10,000 devices are about 12 MiB
TAILSCALE_TIMEOUT_S = 3.0  # it answers from memory; a hung one must not hold the look for our address
ADDRESS_LOOK_S = 2.0  # how often this machine's address is looked at: often enough to feel immediate
PAUSE_LOOK_S = (
    0.25  # how often it is asked whether the machine slept; reports are believed no longer than that
)
PAUSE_MIN_S = 1.0  # a shorter sleep ages no report noticeably
MOVE_GRACE_S = 15.0  # members kept after this node moved until they are met again; a join takes 3 s
FORMER_ADDRESSES_MAX = 16  # a roaming laptop's; about 100 B each
HURRY_S = 75.0  # a moved node's old record is forgotten about 36 s later, at an exchange every 30 s at most
HURRY_INTERVAL_S = 3.0  # rounds of discovery meanwhile
HURRY_MEMBERS = 3  # present members asked in each of them
ROUND_GAP_S = 0.5  # between two rounds of discovery, however often news come
ROUNDS_AT_ONCE = 4  # rounds under way; one with silent addresses takes 3 s for each JOINS_AT_ONCE of them
MISSING_INTERVAL_S = 10.0  # rounds of discovery after a member died: what a healed split costs at most
MISSING_S = 600.0  # and for how long; later the usual interval finds it
YOUNG_INTERVAL_S = (
    2.0  # rounds of discovery after the start: machines switched on together miss each other at first
)
YOUNG_S = 60.0  # and for how long; 30 rounds, each of which tries only addresses that are no members
GOSSIP_STREAM_S = 3.0  # one exchange of all members over TCP; 1,024 of them are about 200 KiB
GOSSIP_MAX_BYTES = 1200  # of a datagram: with all headers it fits the 1,280 bytes of a tailnet or IPv6 tunnel
MDNS_INSTANCES_MAX = 128  # answers remembered; about 1 KiB each. More is a fault or an attack
MDNS_ADDRESSES_MAX = 8  # addresses tried of one answer
MDNS_TTL_S = 120  # how long others remember a node that ended without a goodbye
MESH_STOP_S = 2.0  # for mDNS's goodbyes; a network that is gone must not hold the stop
MDNS_ASK_S = 2.0  # for the details of an answer; a LAN answers in milliseconds
TAILNET_NAME_ASK_S = 60.0  # for CORS: a page of a tailnet just joined is let in after that
ALIAS_MESSAGE_MAX_BYTES = 60 * KIB  # a piece of the table; kinship sends at most 64 KiB, envelope included
ALIAS_INBOX_MAX = 64  # messages not looked at yet, 4 MiB; what is dropped is sent again when tables differ
ALIAS_OUTBOX_MAX = 256  # writes not told yet, 1 KB each; as above
ALIAS_REPAIR_S = 5.0  # between two sendings of the table to one member; doubles while it changes nothing
ALIAS_REPAIR_MAX_S = 300.0  # a member that cannot take our table costs 100 KB in five minutes
ALIAS_PIECE_PAUSE_S = 0.05  # between two pieces: a table goes out at 1.2 MB/s at most
ALIAS_PURGE_S = 60.0  # how often expired removals are looked for

# -- kv --------------------------------------------------------------------------------------------
KV_STATE_MAX_BYTES = 256 * GIB  # one save-file; a larger claim is refused before anything is allocated
KV_TOKENS_MAX = (
    4 * 1024 * 1024
)  # tokens of one save-file; its cell list is read whole: 48 MiB of bytes at worst
KV_STREAMS_MAX = 256  # slots of one engine; llama.cpp's own limit of parallel sequences
KV_LAYERS_MAX = 1024  # cache layers of one state; the largest models have about 130. 16 KiB a plane list
KV_ROW_MAX_BYTES = 16 * MIB  # one row of one layer; real ones are 0.5-64 KiB
KV_BLOB_MAX_BYTES = 4 * GIB  # a recurrent state or checkpoint; 150 MiB for a 27B hybrid. Never read whole
KV_CHECKPOINTS_MAX = 256  # in one save-file; engines keep 32. About 300 B each
KV_RUNS_MAX = 65_536  # pieces a cache's positions stand in; usually 1 or 2. About 150 B each, 10 MiB
KV_GROUP_ROWS_MAX = 256  # positions of a group, the unit of hashing; fewer where a row of all layers is large
KV_GROUP_BYTES = 2 * MIB  # rows of a group of one cache, unless a single position is larger
KV_GROUPS_MAX = 32_768  # of one cache; 16 B of digest each: 512 KiB. 8 M tokens, or 64 GiB of rows
KV_FRAME_MAX_BYTES = 4 * MIB  # payload of a data frame; a position whose rows are larger does not travel
KV_BLOB_PIECE_BYTES = 2 * MIB  # payload of a BLOB frame
KV_TOKENS_PIECE = 256 * 1024  # tokens of a TOKENS frame: 1 MiB
KV_PREFIX_TOKENS = 256  # a digest of an offer covers so many more tokens; 16 B each: 256 KiB at 4 M tokens
KV_MARKS_MAX = 16  # earlier generations an offer names; about 300 B each
KV_BLOBS_MAX = 8  # in one offer: a recurrent state and checkpoints, about 1 KiB each with their windows
KV_RECURRENT_KEPT = 3  # newest recurrent states of a replica: a turn edited goes back one or two turns
KV_CHECKPOINTS_KEPT = 2  # newest checkpoints of a replica; engines make one every few thousand tokens
KV_COMPRESS_GAIN = 0.97  # a piece that stays larger than this share of itself travels as it is
KV_COMPRESS_BELOW_BYTES_PER_S = 250_000_000.0  # planes and zstandard take 300-500 MB/s in one thread
KV_COMPRESS_LEVEL = 1  # zstandard; higher levels gain 1 % on f16 rows and are slower than a 1 Gb/s link
KV_SENDFILE_BYTES = (
    32 * KIB
)  # shorter runs of a file are cheaper gathered and sent from memory than one by one
KV_RING_BUFFERS = 4  # frames between the two threads of a transfer: 8 MiB a job, 16 MiB at worst
KV_MESSAGE_MAX_BYTES = 2 * MIB  # any other frame: the digests of two caches at their most, 1 MiB, and facts
KV_MANIFEST_MAX_BYTES = 32 * MIB  # a manifest: 4 M tokens, 16 MiB, and two caches' digests
KV_CIPHER_TEST_BYTES = MIB  # a frame's worth; shorter pieces measure the call instead of the cipher
KV_CIPHER_TEST_ROUNDS = 8  # of each cipher when a worker starts, the best counts: 5 to 20 ms in all
KV_CONTROL_MAX_BYTES = 128 * KIB  # one message between control and worker; below the kernel's socket buffer
KV_LOCAL_JOBS = 4  # renders and inspections at once in one worker; more wait for a thread
KV_JOBS_MAX = 16  # transfers at once in one worker; each has two threads and one ring: 256 MiB at worst
KV_REPLICAS_MAX = 4096  # replicas of one worker; about 1 KiB of facts each in memory
KV_REPLICA_AGE_S = (
    86_400.0  # a replica nobody renewed for a day is removed: a conversation is nobody's to keep
)
KV_HANDSHAKE_S = 5.0  # both proofs exchanged within this, or the socket is closed
KV_SILENCE_S = 8.0  # a peer that moves nothing for this long is gone; a LAN stall is far shorter
KV_DRAIN_MIN_BYTES = (
    16 * KIB
)  # that a link must take of what we sent in KV_SILENCE_S: 2 KB/s carries nothing in time
KV_JOB_DEADLINE_S = 600.0  # whole transfer: 250 MB at 0.5 MB/s; slower than that a cold prefill wins
KV_LINGER_S = 2.0  # after a refusal: time for the peer to read the reason before the socket closes
KV_DISK_RESERVE_BYTES = 64 * MIB  # left free on the replica folder's filesystem, for the engine's own save
KV_SUPERSEDE_S = 5.0  # a newer state waits so long for the unfinished one of its session to let go
KV_RENDER_THREADS = 3  # one copies at 1-2 GB/s; more would take the cores the engine prefills with
KV_RESTART_MIN_S = 0.2  # pause before a died worker is started again; doubles up to the maximum
KV_RESTART_MAX_S = 30.0  # a worker that dies at once is tried twice a minute
KV_STABLE_S = 60.0  # a worker that lived this long starts again with the shortest pause
KV_LOG_LINE_MAX_BYTES = 4096  # a longer line of a worker's error output is cut

# -- direct links ----------------------------------------------------------------------------------
LINK_ADDRESSES_MAX = 16  # told to a peer, and believed of one; a host with more has bridges of its guests
LINK_PATHS_MAX = 32  # probed to one peer; about 400 B each, 13 KiB
LINK_PEERS_MAX = 128  # peers with paths of their own, 2 MiB; the others are reached by their mesh address
LINK_LOOK_S = 5.0  # how often this machine's addresses are looked at: a cable just plugged in is soon used
LINK_CHECK_S = 60.0  # between two rounds of probes to a peer; a round is a few requests of 16 KiB
LINK_AGAIN_S = 5.0  # the same after a failure; doubles up to LINK_CHECK_S
LINK_CHECKS_AT_ONCE = 8  # peers being probed; each has one probe under way
LINK_PROBE_S = 2.0  # for one whole probe; a path that takes longer is no better than none
LINK_PAD_BYTES = 16 * KIB  # of a probe, both ways: more than a jumbo frame, for small packets pass anywhere
LINK_BODY_MAX_BYTES = 64 * KIB  # of a question; its pad and 16 addresses are 18 KiB
LINK_ANSWER_MAX_BYTES = 64 * KIB  # of an answer, held while it is decoded; LINK_CHECKS_AT_ONCE of them
LINK_BODY_S = 5.0  # for a question's body to come
LINK_QUESTIONS_AT_ONCE = 16  # being read, of pulls as many: no proof can be checked before. 1.1 MiB at worst
LINK_RATE_ALPHA = 0.3  # weight of the newest transfer; the last seven or so matter
LINK_RATE_MIN_BYTES = 4 * MIB  # a smaller transfer measures its round trips
LINK_RATE_KEPT_S = 600.0  # a measured speed is believed so long; congestion then is not the link's speed
LINK_KEPT_MIN = 0.25  # of its nominal speed; a path measured below it hides a slower link, not a slow machine
LINK_GUESS_BYTES_PER_S = 125e6  # of a path nobody knows the speed of: 1 Gb/s, the commonest link
LINK_TUNNEL_BYTES_PER_S = 50e6  # the same of a tailnet's tunnel, whose cipher runs on one core
LINK_WINDOW_BYTES = 4 * MIB  # in flight on one connection; Linux grows its buffers to 4-6 MiB
LINK_NEAR_S = 0.03  # a shorter round trip bounds nothing: a busy machine adds as much to it
LINK_SILENCE_MS = 3000  # a direct link that acknowledges nothing for so long is cut: there is another path
LINK_LISTENERS_MAX = 64  # addresses the API listens at for them; a cable replugged more often than that waits
LINK_SUPERSEDE_S = 0.5  # between two tries while the peer still takes a broken-off transfer for running
LINK_SUPERSEDE_TRIES = 20  # 10 s: its own KV_SILENCE_S and room

# -- node ------------------------------------------------------------------------------------------
STALL_S = 5.0  # a request unanswered on an idle engine for so long is lost: five polls are no accident
SILENT_S = 1.0  # after an engine left routing by its silence: one more look, then its unbegun requests move
LEFT_DRAIN_S = 120.0  # a node that took its leave may run our requests so long; its grace is 60 s by default
STALL_LOOK_S = 1.0  # how often that is looked at
ENGINES_STOP_S = 10.0  # engines get this long after SIGTERM before SIGKILL
KV_CLOCK_SKEW_MS = 86_400_000  # a generation further ahead would keep every later state of its session out
KV_TRANSFERS_SHOWN = 20  # newest transfers in /v1/status; about 600 B each
KV_PEERS_COUNTED = 128  # peers with sums of their own, the others are one; about 1 KiB each
KV_LISTED_MAX = 256  # of each list in /v1/kv, the newest; about 200 B each
KV_PUSHES_AT_ONCE = 4  # states on their way out; each has one save-file in the engine's folder
KV_RECEIVES_AT_ONCE = 8  # states on their way in; each takes one thread pair and its buffers in the worker
KV_STALL_SHARE_MIN = 0.001  # less would pay for one save of a large state in an hour
KV_STALL_WINDOW_S = (
    60.0  # an engine that rested may be stopped for this window's share of stalls at once: 3 s
)
KV_DEBOUNCE_S = 2.0  # between two saves of a slot, for quick turns follow each other within it
KV_DEBOUNCE_TOKENS = 256  # new rows that are not waited with: reading them anew takes a second or more
KV_RECURRENT_AT_ONCE_S = 0.7  # 150 MiB at 2 Gb/s; a recurrent part that takes longer waits for rest
KV_PUT_OFF_S = 0.1  # until the next look whether requests still wait where a save is to begin
KV_PUSH_TRIES = 5  # of one generation while every peer fails; by their back-off that is about half a minute
KV_PEER_BACKOFF_S = 1.0  # a peer that a state could not be brought to rests, twice as long each time
KV_PEER_BACKOFF_MAX_S = 60.0  # and at most so long: one offer a minute to a peer that is broken
KV_FULL_LONG_S = 30.0  # a peer seen without a free slot for so long is hardly the next host
KV_PREFILL_GUESS_MS_PER_1K = 500.0  # where none was measured: 2,000 tokens/s, so that little seems lost
KV_STASH_GAIN = 4  # a state is kept before its slot is taken when reading it anew costs so many saves of it
KV_SAVE_GUESS_S_PER_GB = 0.7  # where no save was measured; an engine writes 1.5 GB/s to memory
KV_PROBE_SAVE_S = 30.0  # an engine that cannot save one token in this time does not take part
KV_PROBE_AGAIN_S = 1.0  # until the next try while its slots are busy or the worker is down; doubles each time
KV_PROBE_AGAIN_MAX_S = 60.0  # a try on a busy engine may save a session's slot, which stops the others
KV_TEST_TOKENS = 48  # of the self-test's prompt: engines make a checkpoint in it, CPUs read it in seconds
KV_TEST_STEP_S = 60.0  # longest step of the self-test; an engine slower than that does not take part
KV_TEST_LOOK_S = 0.05  # how soon the self-test gives its slot to a request that waits for one
KV_VERDICTS_MAX = 256  # verdicts kept in `state_dir`, the newest; models x engine builds x flags
KV_VERDICT_FILE_MAX_BYTES = MIB  # 256 verdicts with the longest reasons are 200 KiB
KV_PROMPT_S = 2.0  # to learn a prompt's tokens from the engine: 100,000 take 0.2-0.5 s, to read them 20 s
KV_SAVE_S = 10.0  # longest save; the connection is then closed, which cancels it
KV_SLOT_SETTLE_S = 2.0  # how long a slot may still be processing after its last byte was relayed
KV_SETTLE_POLL_S = 0.02  # between two looks at it meanwhile; mostly the first one finds it at rest
KV_IMPORT_MIN_S = 0.5  # an import is given this long, however fast the model prefills
KV_IMPORT_MAX_S = 30.0  # longest import, and its bound while the model's prefill time is not measured
KV_IMPORT_GUESS_S = 0.05  # of any import until some were measured: two exchanges with the engine and a file
KV_IMPORT_GUESS_S_PER_BYTE = 2e-9  # the same for its bytes: written and read at 1 GB/s each
KV_IMPORT_TYPICAL_TOKENS = 8192  # of a session; its import's cost is told to peers for each thousand of them
KV_HELD_ASK_S = 0.5  # for an engine to tell what a slot holds; it answers in 1 ms unless a batch is running
KV_PULL_GUESS_S = (
    0.1  # of any pull beside its bytes: the question, the channel's handshake, two probes' worth
)
KV_PULL_MAX_S = 30.0  # longest wait for a state; whoever needs longer reads the prompt meanwhile
KV_PULL_BODY_MAX_BYTES = 4 * KIB  # of the question: a model's name and three numbers
KV_PULLS_AT_ONCE = 8  # for all peers; each is one save or one rendered file in an engine's folder
KV_PULLS_PER_PEER = 2  # of them for one peer, so that one cannot keep this node's engines saving
KV_EVICTED_MAX = 1024  # sessions whose replica made room for another, remembered to say so; 150 B each
KV_NO_REUSE_MAX = 2  # restores in a row without any reuse before a model stops being shared
FULL_ANSWERS_MAX = 12  # times one request finds a slot taken on its way; then it has had its turn: 429
RETRIED_REQUESTS_MAX = 4096  # requests whose queue time is remembered for their next try; 100 B each, 0.4 MiB
REQUEST_LINES_PER_S = 50  # log lines of ended requests; a fleet's real turns are fewer, a load test's are not
METRIC_MODELS_MAX = 256  # models with figures of their own; peers name models too. 40 numbers each, 1 MiB
METRIC_WORDS_MAX = 64  # kinds shown of one block of numbers; a peer's refusal can bring words of its own
STATUS_POLL_S = (
    5.0  # of every member's /v1/status while somebody looks at the cluster; 6 a second in 32 nodes
)
STATUS_TIMEOUT_S = 2.0  # for one answer; also how long the first /v1/cluster waits for its first round
STATUS_BODY_MAX_BYTES = 4 * MIB  # of one status; 256 models with 50 log lines a backend are about 2 MiB
STATUSES_MAX_BYTES = 64 * MIB  # of all members' statuses held; beyond it a member shows none
STATUS_KEPT_S = 20.0  # four polls; an older status would show a picture that stands still
STATUS_POLLS_AT_ONCE = 16  # under way; each holds at most one body
CLUSTER_WATCHED_S = 60.0  # polling goes on for so long after the last question for the cluster
CLUSTER_LOOK_S = 1.0  # how often the stream looks for a changed picture
VIEWER_BUFFER_FRAMES = 256  # of one viewer of the mesh stream; one that is further behind is cut off
VIEWERS_MAX = 32  # of the mesh stream; snapshots of 32 nodes are about 200 KiB, a frame's bytes are shared
HUB_MEMBERS_MAX = 128  # members whose activity is followed; 256 events of at most 1.2 KiB each, 40 MiB
HUB_EVENTS_PER_MEMBER = 256  # kept of each for viewers that come later
HUB_FRAME_MAX_BYTES = 64 * KIB  # of a member's stream without an event's end; its events are under 1 KiB
HUB_SILENCE_S = 30.0  # three missed comments: the member's stream is dead
HUB_RETRY_MIN_S = 1.0  # before a member is followed again; doubles up to the maximum
HUB_RETRY_MAX_S = 30.0  # a member that is down for long costs two connections a minute
HUB_HEALTHY_S = 10.0  # a stream that lasted so long starts again with the shortest pause
ALIAS_FILE_MAX_BYTES = 16 * MIB  # ALIAS_NAMES_MAX of the largest entries are 12 MB; read once at start
ALIAS_BODY_MAX_BYTES = 64 * KIB  # of a PUT; what fits into ALIAS_SETTING_MAX_BYTES is far smaller

# -- client ----------------------------------------------------------------------------------------
FLEET_POLL_S = 300.0  # between two questions of one client: a fleet changes when machines do
FLEET_TIMEOUT_S = 5.0  # for the answer, which a node has in memory
FLEET_BODY_MAX_BYTES = 1 * MIB  # of the answer; 1,024 hosts of one model are about 150 KiB
FLEET_HOSTS_MAX = 1024  # hosts taken from one answer; about 200 B each
FLEET_SLOTS_MAX = 1_000_000  # of one host; a larger number is a fault of its sender
FLEET_DAMPING = 0.1  # of the present number (at least 1): smaller changes are noise
FLEET_SHRINK = 0.25  # of the present number (at least 1): the most it falls in one poll

# -- cli -------------------------------------------------------------------------------------------
CONTROL_TIMEOUT_S = 5.0  # for a node's whole answer; `--timeout` overrides
CONTROL_TIMEOUT_MAX_S = 3600.0  # a longer one is a slip
ALIAS_LOOK_S = 0.25  # between two looks at the members after a write; they know within a fraction of it
ALIAS_LOOK_TIMEOUT_S = 1.0  # for one member's table, which it has in memory
ALIAS_LOOKS_AT_ONCE = 8  # members asked at once; one that hangs delays the others of its turn by a second
CONTROL_ANSWER_MAX_BYTES = 16 * MIB  # of a node to a command; held while it is decoded

# -- bench -----------------------------------------------------------------------------------------
BENCH_FILE_MAX_BYTES = 64 * MIB  # of results that are read again; 90 minutes of figures are under 1 MiB
PACED_BODY_MAX_BYTES = 16 * MIB  # of a request to the simulated engine; its own agents send under 1 MiB
AGENT_TURN_MAX_S = 900.0  # for one turn of a benchmark's agent; a cold prompt on a slow engine takes minutes
AGENT_ANSWER_MAX_BYTES = 8 * MIB  # of one turn's stream, about 30,000 tokens with an event each
BENCH_PORT = 8088  # of `viiwork bench kvshare --listen`: beside a node's 8086, so both can run
BENCH_SIZE_MIN_BYTES = 1 * MIB  # of a state; less is all handshake and no link
BENCH_SIZE_MAX_BYTES = 64 * GIB  # of a state; the far end's memory holds it twice while it is rendered
BENCH_SIZE_BYTES = 247 * MIB  # the published study's delta, so that times compare
BENCH_RUNS = 5  # of each way to send; a median of fewer hides a bad one
BENCH_RUNS_MAX = 1000  # a larger number is a slip
BENCH_BUSY_SHARE = 0.2  # of the CPUs with other work: what is measured beside it is said to be
BENCH_BUSY_LOOK_S = 0.5  # for that to be seen
BENCH_PATHS_MAX = 8  # paths measured between two hosts; each takes minutes on a slow link
BENCH_LINE_MAX_BYTES = 128  # of the line that opens a connection, before anything is proven
BENCH_CONNECTIONS_MAX = 16  # of a listening end, each a socket and at most 1 MiB of buffer
BENCH_PROMPT_TOKENS = 2048  # of the state that a real engine makes; 20 s of a small model on two CPUs
BENCH_PREFILL_S = 600.0  # for it to read them
BENCH_ENGINE_START_S = 600.0  # for it to load its model
BENCH_START_S = 20.0  # for a listening end to start, imports included
BENCH_AWAITED_S = 30.0  # for the host that asked a node to listen; then the listening end goes
BENCH_OPEN_S = 15.0  # for a connection's opening line, its answer and the proofs, also on a busy host
BENCH_ANSWER_S = 660.0  # for an answer of the far end, which may be receiving: a transfer's deadline and more
BENCH_SILENCE_S = 8.0  # a raw stream that moves nothing for so long is broken, as a transfer is
BENCH_RAW_BUFFER_BYTES = 1 * MIB  # of a raw stream's receiver; iperf3's 128 KiB cost it a tenth at 10 Gb/s
BENCH_SPARE_BYTES = 128 * MIB  # that must stay free on the far end beside the states
BENCH_READY_S = 120.0  # for a workload's node to serve and to hear its peer; engines load meanwhile
BENCH_STATUS_S = 10.0  # for a node's status during a workload; a busy machine is slow
AGENTS_MAX = 256  # sessions of a workload; each holds its own context, about 200 KB of text, in one process
WORKLOAD_MINUTES_MAX = 1440.0  # of one run; a day is beyond any study
WORKLOAD_SPEED = 2.0  # beyond it the waits of viiwork that are not scaled weigh more than the link
WORKLOAD_SCALE = 64  # a state of 32k tokens is 35 MiB then
WORKLOAD_SPEED_MAX = 50.0  # time made shorter; beyond it steps of an engine are under a millisecond
WORKLOAD_SCALE_MAX = 256  # a row is 128 bytes then
