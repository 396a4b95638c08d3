"""What a backend's ladder hears and what it answers with: plain values."""

from __future__ import annotations

from dataclasses import dataclass


# -- events ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GateOpened:
    """No other backend loads now."""


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    why: str
    is_usage: bool  # it can never work as configured


@dataclass(frozen=True, slots=True)
class Answered:
    """A starting engine is ready for its warm-up."""


@dataclass(frozen=True, slots=True)
class ForeignAnswered:
    """Somebody else listens on the engine's port."""

    who: str


@dataclass(frozen=True, slots=True)
class WarmedUp:
    pass


@dataclass(frozen=True, slots=True)
class WarmUpFailed:
    why: str


@dataclass(frozen=True, slots=True)
class ProbeOk:
    pass


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    why: str


@dataclass(frozen=True, slots=True)
class Silent:
    """A load poll got no answer, and the engine does nothing that would explain it."""

    why: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A load poll was answered."""


@dataclass(frozen=True, slots=True)
class Proved:
    """An engine that had lost a request ran a token."""


@dataclass(frozen=True, slots=True)
class ProofFailed:
    why: str


@dataclass(frozen=True, slots=True)
class HardFailure:
    """The inference path saw a refused, reset or cut connection."""

    why: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """The engine took a request, is idle, and has not answered it."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A request was answered."""


@dataclass(frozen=True, slots=True)
class WrongCards:
    """The engine holds memory on cards that are not its own."""

    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process and its group are gone, asked to or not."""

    why: str
    usage: str = ""  # why it can never work as configured, when its output says so


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    GateOpened
    | SpawnFailed
    | Answered
    | ForeignAnswered
    | WarmedUp
    | WarmUpFailed
    | ProbeOk
    | ProbeFailed
    | Silent
    | Heard
    | Proved
    | ProofFailed
    | HardFailure
    | Stalled
    | Succeeded
    | WrongCards
    | Exited
    | Tick
)


# -- effects ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the engine on a new port."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run one token in every slot."""


@dataclass(frozen=True, slots=True)
class Prove:
    """Let it run one token: only that tells whether it can still serve."""


@dataclass(frozen=True, slots=True)
class ProbeNow:
    """Do not wait for the next interval."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process; `Exited` follows."""

    grace_s: float


Effect = Spawn | WarmUp | Prove | ProbeNow | Stop
