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
MODEL_NAME_MAX_CHARS = 1024  # no engine has a longer one; error messages repeat it
SSE_LINE_MAX_BYTES = 256 * KIB  # the scanner's memory per stream; 256 streams with huge events are 64 MiB
SSE_TAIL_BYTES = 16 * KIB  # kept of a longer line; token counts stand at the end
ANSWER_TAIL_BYTES = 256 * KIB  # kept of a non-streamed answer to read its token counts; as above
CONNECT_S = 3.0  # to an engine or a peer; one lost SYN is resent after 1 s
ROUTE_ATTEMPTS_MAX = 16  # routes tried for one request; the dispatcher normally ends it long before
UPSTREAM_IDLE_S = 4.0  # a kept-alive connection to an engine; llama.cpp closes them after 5 s
UPSTREAM_IDLE_MAX = 256  # such connections kept in all, about 20 KiB each
REFUSAL_DRAIN_BYTES = 64 * KIB  # read of a refusal so that its connection can be used again
REFUSAL_DRAIN_S = 1.0  # and for how long
CHANNEL_OFFER_MAX_BYTES = 64 * KIB  # of a kv channel's opening request
CHANNEL_OFFER_S = 5.0  # for it to come
PEER_DEAD_S = 30.0  # a peer whose kernel acknowledges nothing for this long broke off

# -- core ------------------------------------------------------------------------------------------
SESSIONS_MAX = 4096  # remembered sessions; about 400 B each, 2 MiB. Beyond it the oldest is forgotten
SESSION_KEY_MAX_BYTES = 1024  # a longer header value is hashed from its first 1,024 bytes

# -- config ----------------------------------------------------------------------------------------

# -- engine ----------------------------------------------------------------------------------------

# -- mesh ------------------------------------------------------------------------------------------

# -- kv --------------------------------------------------------------------------------------------

# -- node ------------------------------------------------------------------------------------------
