"""The values one request is decided with: what is asked, what is granted, how it ended.

Each request makes one of each, so they are structs of msgspec: a frozen dataclass takes ten times as
long to make.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

Result = Literal[
    "done",  # the answer went to the client whole, whatever its status
    "refused",  # 429 or 503 before the first byte; another route may take it
    "unreachable",  # no connection, or it broke before the first byte
    "stalled",  # accepted, then silent for too long before the first byte
    "broken",  # broke after the first byte went to the client
    "client_gone",  # the client left
]


class Chain(Struct, frozen=True, gc=False):
    """A conversation as hashes of its prefixes: link i covers everything up to and including message i."""

    links: tuple[
        str, ...
    ]  # 16 hex digits each; link 0 covers what stands before the messages (tools, system)
    ends: tuple[int, ...]  # bytes of the body that each link covers


class Held(NamedTuple):
    """How much of a request's prompt a node holds already."""

    n_tokens: int
    where: Literal["slot", "ram", "replica"]  # in a slot, in the engine's RAM cache, as a replica of kv_share


class Ask(Struct, frozen=True, gc=False):
    """One request, as far as routing needs to know it."""

    request_id: str
    model: str
    session: str | None = None  # the conversation this turn continues or begins, 32 hex digits
    home: str = ""  # node of the conversation's last turn, as the entry node knows it; "" = it does not
    parent: str | None = None  # the session whose earlier state this turn begins with, itself after an edit
    shared_tokens: int = 0  # how much of that is still right, estimated
    session_key: str | None = None  # the client's own key for it, hashed: 32 hex digits
    chain: Chain | None = None  # None when the body holds no conversation that could be read
    pin: str | None = None  # the only node that may run it (`?host=`)
    prefer: tuple[str, ...] = ()  # nodes to take first while they have room (`?prefer=`)
    kv_share: bool = True  # False: this session's state must not leave the node
    needs_slot: bool = True  # False for tokenize, detokenize, apply-template, count_tokens
    pinnable: bool = True  # the engine honours `id_slot` in the body of this endpoint
    body_bytes: int = 0
    alias: str | None = None  # what the client called the model, when that is not its name
    forwarded_by: str | None = None  # entry node of a verified forward; such a request makes no further hop
    wait_ms: int = 0  # how long such a forward may wait for a slot here; 0 = it runs at once or is refused


class Grant(Struct, eq=False):
    """The right to run one request at one place; must be given back with `finish` exactly once."""

    ask: Ask
    node: str  # who executes
    url: str  # base URL of the engine or of the peer's API, without a trailing slash
    backend: str = ""  # backend id when local, "" on a forward
    slot: int | None = None  # slot to pin, when local and pinnable
    queued_s: float = 0.0
    lease: int = 0  # lease number in the slot table, 0 when none was needed
    wait_ms: int = 0  # how long a forward may wait for a slot at its peer, 0 = not at all
    answered: bool = False  # more than comments of the upstream's answer has come
    finished: bool = False

    @property
    def is_forward(self) -> bool:
        return not self.backend


class Usage(Struct, frozen=True, gc=False):
    """Token counts of one turn as the engine reported them; None = not reported."""

    cached: int | None = None  # prompt tokens taken from the slot (`cache_n`)
    prefilled: int | None = None  # prompt tokens read anew (`prompt_n`)
    generated: int | None = None

    @property
    def total(self) -> int | None:
        """Tokens the slot holds after the turn: the last sampled token was never decoded."""
        if self.cached is None or self.prefilled is None:
            return None
        return self.cached + self.prefilled + max((self.generated or 0) - 1, 0)


class Outcome(Struct, frozen=True, gc=False):
    """How a granted request ended."""

    result: Result
    status: int = 0  # HTTP status of the upstream, 0 when none came
    ttft_s: float | None = None  # request granted -> first byte of content
    streamed: bool = False  # an event stream; the first byte of a plain answer comes with its last token
    duration_s: float = 0.0
    usage: Usage | None = None
    detail: str = ""  # one line for logs when something failed
