"""One error tree. A class says what machines need to know: code, HTTP status, exit code, retry hint.

ViiworkError
|- UsageError            the command line, the config file or another given file is wrong (exit 2)
|  `- ConfigError
|- RequestError          the client's request is wrong (4xx)
|- Refused               nobody takes the request now (429, 503)
|- UpstreamError         an engine or a peer failed (502)
|- EngineError           an engine cannot be started or asked
|- BenchError            a measurement cannot be made or broke off
|- MeshError             membership and peers
`- KvError               a KV state could not be moved; the turn runs cold
"""

from __future__ import annotations

from typing import ClassVar

_BY_CODE: dict[str, type[ViiworkError]] = {}


class ViiworkError(Exception):
    """Base of all errors viiwork raises on purpose; `str(error)` is one line for a person."""

    code: ClassVar[str] = "internal"
    type: ClassVar[str] = "server_error"  # `error.type` in the JSON body
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    retry_after_s: ClassVar[int | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            raise TypeError(f"{cls.__name__} must declare its own code")
        other = _BY_CODE.setdefault(cls.code, cls)
        if other is not cls and other.__qualname__ != cls.__qualname__:
            raise TypeError(f"error code {cls.code!r} is taken by {other.__name__}")


# -- usage -----------------------------------------------------------------------------------------
class UsageError(ViiworkError):
    """The command line is wrong."""

    code, exit_code = "usage", 2


class ConfigError(UsageError):
    """The config file is wrong: file, line, key path, what was expected."""

    code = "config"


class NodeUnreachable(ViiworkError):
    """A command got no usable answer from the node it asked."""

    code = "node_unreachable"


class NodeRefused(ViiworkError):
    """The node a command asked said no; `status` is its HTTP status."""

    code = "node_refused"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class TraceError(UsageError):
    """A file is not an arrival trace: file, line, what is wrong."""

    code = "trace"


class StateDirError(ViiworkError):
    """A folder the node needs cannot be used."""

    code = "state_dir"


# -- requests --------------------------------------------------------------------------------------
class RequestError(ViiworkError):
    """The client's request is wrong."""

    code, type, http_status = "invalid_request", "invalid_request", 400


class BodyTooLarge(RequestError):
    code, http_status = "body_too_large", 413


class MethodNotAllowed(RequestError):
    code, http_status = "method_not_allowed", 405

    def __init__(self, message: str, *, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow


class UnsupportedBody(RequestError):
    """The body is compressed or not JSON by its own declaration."""

    code, http_status = "unsupported_body", 415


class BodyTimeout(RequestError):
    """The client stopped sending in the middle of its request."""

    code, http_status = "body_timeout", 408


class NotFound(RequestError):
    code, type, http_status = "not_found", "not_found", 404


class UnknownModel(NotFound):
    """No node of the mesh serves the model, or the pinned host does not."""

    code = "unknown_model"


class UnknownAlias(NotFound):
    """No alias has this name."""

    code = "unknown_alias"


class AliasConflict(RequestError):
    """A write to the alias table that makes no sense as things are; the message says why."""

    code, http_status = "alias_conflict", 409


class Unauthorized(RequestError):
    """A signature is missing or wrong."""

    code, type, http_status = "unauthorized", "forbidden", 401


class Forbidden(RequestError):
    code, type, http_status = "forbidden", "forbidden", 403


# -- refusals --------------------------------------------------------------------------------------
class Refused(ViiworkError):
    """The request is fine; nobody takes it now."""

    code, type, http_status, exit_code = "refused", "unavailable", 503, 75
    retry_after_s: ClassVar[int | None] = 2


class QueueFull(Refused):
    """The model's queue holds `routing.queue_max` requests already."""

    code, type, http_status = "queue_full", "rate_limit", 429


class QueueTimeout(Refused):
    """No slot opened for the model within `routing.queue_timeout`."""

    code, type, http_status = "queue_timeout", "rate_limit", 429


class NoFreeSlot(Refused):
    """A forwarded request found no free slot; forwards never wait."""

    code, type, http_status, retry_after_s = "no_free_slot", "rate_limit", 429, None


class NotServedHere(Refused):
    """A forward for a model this node does not serve (any more)."""

    code, retry_after_s = "not_served_here", 1


class AllRoutesRefused(Refused):
    """Every node that serves the model refused."""

    code = "all_routes_refused"


class ShuttingDown(Refused):
    """The node drains before it stops."""

    code, retry_after_s = "shutting_down", 5


class AliasUnserved(Refused):
    """Nobody serves any model an alias may stand for."""

    code, retry_after_s = "alias_unserved", 5


class AliasNotSaved(Refused):
    """The alias table could not be written to disk, so nothing was changed."""

    code = "alias_not_saved"


class KvRefused(RequestError):
    """This node does not take the offered state; the message says why."""

    code, http_status = "kv_refused", 409


class TooManyBodies(Refused):
    """The request bodies held at once reached their cap."""

    code = "too_many_bodies"


class TooManyViewers(Refused):
    """The clients of the mesh stream reached their cap."""

    code = "too_many_viewers"


# -- upstream --------------------------------------------------------------------------------------
class UpstreamError(ViiworkError):
    """An engine or a peer failed before its answer could be used."""

    code, type, http_status = "upstream", "server_error", 502


class UpstreamUnreachable(UpstreamError):
    """No connection, or it broke before the first byte of the answer."""

    code = "upstream_unreachable"


class UpstreamStalled(UpstreamError):
    """The upstream accepted the request and then stayed silent for too long."""

    code, http_status = "upstream_stalled", 504


# -- parts -----------------------------------------------------------------------------------------
class EngineError(ViiworkError):
    """An engine cannot be started, asked or understood."""

    code = "engine"


class EngineUsageError(EngineError):
    """The command for an engine cannot work as configured; trying again changes nothing."""

    code = "engine_usage"


class ModelFileError(EngineError):
    """A model file is missing, incomplete or not a GGUF file."""

    code = "model_file"


class BenchError(ViiworkError):
    """A measurement cannot be made, or broke off; the message names the host and what to do."""

    code, http_status = "bench", 503


class NobodyListens(BenchError):
    """No listening end of a benchmark answers at the address."""

    code = "nobody_listens"


class MeshError(ViiworkError):
    """Membership or a peer conversation failed."""

    code = "mesh"


class BadReport(MeshError):
    """What a peer reports of itself cannot be read or believed."""

    code = "bad_report"


class BadAliases(MeshError):
    """What should be an alias table is none; the message says what is wrong with it."""

    code = "bad_aliases"


class DuplicateName(MeshError):
    """Another node of the mesh bears this node's name already."""

    code = "duplicate_name"


class PortTaken(MeshError):
    """A port of the node is in use; the message names port, protocol and, where known, the owner."""

    code = "port_taken"


class NoOwnAddress(MeshError):
    """No address of this machine is fit for the mesh."""

    code = "no_own_address"


class ChannelRefused(MeshError):
    """A peer did not open the raw channel; `status` is its HTTP status, 0 when no answer came."""

    code = "channel_refused"

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class KvError(ViiworkError):
    """A KV state was not moved; `reason` is a short stable word that is counted and shown."""

    code = "kv"

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class SaveFileError(KvError):
    """A save-file is not what it should be."""

    code = "save_file"


class ChannelError(KvError):
    """The peer of a KV channel broke the protocol, or its proof is wrong."""

    code = "kv_channel"
