"""Bodies of `/v1/capacity` and `/v1/fleet/capacity`: JSON to values and back.

Unknown fields are ignored, so newer nodes may add some; known ones must have their type and range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from viiwork.core.capacity import CapacityReport, FleetModel, HostCapacity, KvIdentity, ModelCapacity, Perf
from viiwork.core.holdings import Holding
from viiwork.core.names import node_name_problem
from viiwork.errors import BadReport
from viiwork.limits import (
    CAPACITY_BODY_MAX_BYTES,
    CAPACITY_COUNT_MAX,
    CAPACITY_CTX_MAX_TOKENS,
    CAPACITY_MILLIS_MAX,
    CAPACITY_MODELS_MAX,
    CAPACITY_TEXT_MAX_CHARS,
    HOLDINGS_MAX,
    HOLDINGS_MAX_BYTES,
    MODEL_NAME_MAX_BYTES,
)

_Count = Annotated[int, Meta(ge=0, le=CAPACITY_COUNT_MAX)]
_Tokens = Annotated[int, Meta(ge=0, le=CAPACITY_CTX_MAX_TOKENS)]
_Millis = Annotated[float, Meta(ge=0, le=CAPACITY_MILLIS_MAX)]
_Text = Annotated[str, Meta(max_length=CAPACITY_TEXT_MAX_CHARS)]
_ModelName = Annotated[str, Meta(min_length=1, max_length=MODEL_NAME_MAX_BYTES)]


_Session = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Link = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
_Generation = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Kv(msgspec.Struct, frozen=True):
    model_fp: _Text
    state: _Text
    cache_type_k: _Text
    cache_type_v: _Text
    v_trans: bool
    n_ctx: _Tokens


class _Model(msgspec.Struct, frozen=True):
    name: _ModelName
    slots: _Count
    busy: _Count
    backends: _Count
    healthy_backends: _Count
    engine: _Text = ""
    queued: _Count = 0
    ctx: _Tokens = 0
    kv: _Kv | UnsetType | None = UNSET
    ttft_overhead_ms: _Millis | UnsetType = UNSET
    prefill_ms_per_1k: _Millis | UnsetType = UNSET
    perf_samples: _Count | UnsetType = UNSET
    import_ms_per_1k: _Millis | UnsetType = UNSET


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """One holding; an array, for there may be hundreds."""

    session: _Session
    tip: _Link
    scope: _Link
    n_tokens: _Tokens
    where: Literal["slot", "ram", "replica"]
    generation: _Generation
    backend: _Text = ""


class _Report(msgspec.Struct, frozen=True):
    node: str
    ver: _Text = ""
    models: Annotated[list[_Model], Meta(max_length=CAPACITY_MODELS_MAX)] | None = None
    aliases: _Text | UnsetType = UNSET
    holdings_rev: _Generation | UnsetType = UNSET
    holdings: dict[_ModelName, Annotated[list[_Held], Meta(max_length=HOLDINGS_MAX)]] | UnsetType = UNSET


_REPORT = msgspec.json.Decoder(_Report, strict=True)


def encode_report(report: CapacityReport) -> bytes:
    """Body of `/v1/capacity`."""
    models = [
        _Model(
            name=m.name,
            engine=m.engine,
            slots=m.slots,
            busy=m.busy,
            queued=m.queued,
            ctx=m.ctx,
            backends=m.backends,
            healthy_backends=m.healthy_backends,
            kv=UNSET if m.kv is None else _kv_wire(m.kv),
            ttft_overhead_ms=UNSET if m.perf is None else m.perf.overhead_ms,
            prefill_ms_per_1k=UNSET if m.perf is None else m.perf.prefill_ms_per_1k,
            perf_samples=UNSET if m.perf is None else m.perf.samples,
            import_ms_per_1k=_told_import(m.perf),
        )
        for m in report.models
    ]
    return msgspec.json.encode(
        _Report(
            report.node,
            report.ver,
            models,
            report.aliases or UNSET,
            report.holdings_rev or UNSET,
            UNSET if report.holdings is None else _holdings_wire(report.holdings),
        )
    )


def decode_report(body: bytes) -> CapacityReport:
    """A peer's body as values; raises `BadReport` with one line for the log."""
    if len(body) > CAPACITY_BODY_MAX_BYTES:
        raise BadReport(f"capacity report of {len(body)} bytes is over {CAPACITY_BODY_MAX_BYTES}")
    try:
        raw = _REPORT.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReport(f"capacity report is not usable: {error}") from error
    if problem := node_name_problem(raw.node):
        raise BadReport(f"capacity report: node name {problem}")
    if not _is_plain(raw.ver):
        raise BadReport("capacity report: version holds control characters")
    models = tuple(_model_value(m) for m in raw.models or ())
    if len({m.name for m in models}) != len(models):
        raise BadReport("capacity report names a model twice")
    aliases = raw.aliases if isinstance(raw.aliases, str) and _is_plain(raw.aliases) else ""
    rev = raw.holdings_rev if isinstance(raw.holdings_rev, int) else 0
    holdings = None if isinstance(raw.holdings, UnsetType) else _holdings_value(raw.holdings)
    return CapacityReport(raw.node, raw.ver, models, aliases, rev, holdings)


def _holdings_wire(holdings: Iterable[Holding]) -> dict[str, list[_Held]]:
    """By model, the newest first, as many as the report has room for."""
    found: dict[str, list[_Held]] = {}
    n_bytes = 0
    for h in holdings:
        entry = _Held(h.session, h.tip, h.scope, h.n_tokens, h.where, h.generation, h.backend)
        n_bytes += len(msgspec.json.encode(entry)) + 1
        if h.model not in found:
            n_bytes += len(msgspec.json.encode(h.model)) + 4
        if n_bytes > HOLDINGS_MAX_BYTES:
            break
        found.setdefault(h.model, []).append(entry)
    return found


def _holdings_value(raw: dict[str, list[_Held]]) -> tuple[Holding, ...]:
    found = [
        Holding(h.session, model, h.tip, h.scope, h.n_tokens, h.where, h.generation, h.backend)
        for model, held in raw.items()
        for h in held
    ]
    if len(found) > HOLDINGS_MAX:
        raise BadReport(f"capacity report tells of {len(found)} sessions, {HOLDINGS_MAX} are allowed")
    if not all(_is_plain(h.model) and _is_plain(h.backend) for h in found):
        raise BadReport("capacity report: bad model or backend name among the holdings")
    found.sort(key=lambda holding: -holding.generation)
    return tuple(found)


def _model_value(raw: _Model) -> ModelCapacity:
    if not _is_plain(raw.name) or any(c.isspace() for c in raw.name) or not _is_plain(raw.engine):
        raise BadReport(f"capacity report: bad model name or engine {raw.name[:80]!r}")
    if raw.healthy_backends > raw.backends:
        raise BadReport(f"capacity report: {raw.name!r} has more healthy backends than backends")
    # More busy than slots is no lie: an engine may have been restarted with fewer. `free` is clamped.
    return ModelCapacity(
        name=raw.name,
        engine=raw.engine,
        slots=raw.slots,
        busy=raw.busy,
        queued=raw.queued,
        ctx=raw.ctx,
        backends=raw.backends,
        healthy_backends=raw.healthy_backends,
        kv=_kv_value(raw.kv) if isinstance(raw.kv, _Kv) else None,
        perf=_perf_value(raw),
    )


def _perf_value(raw: _Model) -> Perf | None:
    """A usable score; a prefill rate of 0 would make a node look infinitely fast and counts as none."""
    overhead, rate = raw.ttft_overhead_ms, raw.prefill_ms_per_1k
    if isinstance(overhead, UnsetType) or isinstance(rate, UnsetType) or rate <= 0:
        return None
    importing = None if isinstance(raw.import_ms_per_1k, UnsetType) else raw.import_ms_per_1k
    return Perf(overhead, rate, raw.perf_samples if isinstance(raw.perf_samples, int) else 0, importing)


def _told_import(perf: Perf | None) -> float | UnsetType:
    told = perf.import_ms_per_1k if perf is not None else None
    return UNSET if told is None else min(told, CAPACITY_MILLIS_MAX)


def _is_plain(text: str) -> bool:
    # isprintable is false for control characters and lone surrogates, which end up in logs and terminals.
    return text.isprintable()


def _kv_wire(kv: KvIdentity) -> _Kv:
    return _Kv(kv.model_fp, kv.state, kv.cache_type_k, kv.cache_type_v, kv.v_trans, kv.n_ctx)


def _kv_value(kv: _Kv) -> KvIdentity:
    return KvIdentity(kv.model_fp, kv.state, kv.cache_type_k, kv.cache_type_v, kv.v_trans, kv.n_ctx)


def fleet_json(
    view: str, ver: str, stale_after_s: float, models: Iterable[FleetModel], resolved_from: str | None = None
) -> dict[str, object]:
    """Body of `/v1/fleet/capacity`; a stale host has an age and no numbers, for absent is not zero.

    `resolved_from` is the alias that was asked for.
    """
    body: dict[str, object] = {"view": view}
    if ver:
        body["ver"] = ver
    seconds = float(stale_after_s)  # the config has a type of its own for them, which nobody can encode
    body["stale_after_s"] = int(seconds) if seconds.is_integer() else seconds
    body["models"] = [_fleet_model_json(m) for m in models]
    if resolved_from is not None:
        body["resolved_from"] = resolved_from
    return body


def _fleet_model_json(model: FleetModel) -> dict[str, object]:
    out: dict[str, object] = {"name": model.name}
    if model.engine:
        out["engine"] = model.engine
    out.update(slots=model.slots, busy=model.busy, free=model.free, queued=model.queued)
    if model.ctx is not None:
        out["ctx"] = model.ctx
    out["hosts"] = [_host_json(h) for h in model.hosts]
    return out


def _host_json(host: HostCapacity) -> dict[str, object]:
    out: dict[str, object] = {"node": host.node}
    if host.api:
        out["api"] = host.api
    if host.model is not None:
        out.update(slots=host.model.slots, busy=host.model.busy, free=host.model.free)
        if host.model.ctx:
            out["ctx"] = host.model.ctx
    out["age_ms"] = int(host.age_s * 1000)
    if host.is_stale:
        out["stale"] = True
    return out
