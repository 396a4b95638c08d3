"""Rules a config obeys beyond the types of its keys; pure, the first broken one is raised as a `Fault`."""

from __future__ import annotations

from viiwork import limits
from viiwork.config import addresses, checks
from viiwork.config.fault import Fault, shown
from viiwork.config.model import (
    ActivitySection,
    ApiSection,
    Config,
    HealthSection,
    KvShareSection,
    MeshSection,
    NodeSection,
    RoutingSection,
)
from viiwork.config.model_rules import check_models
from viiwork.config.scalars import format_duration
from viiwork.core.cross_origin import parse_pattern
from viiwork.core.names import node_name_problem


def check_rules(config: Config) -> list[str]:
    """Warnings about what is legal but rarely meant; raises `Fault` for what is not legal."""
    warnings: list[str] = []
    _node(config.node)
    _api(config.api, warnings)
    _mesh(config, warnings)
    _routing(config.routing, config.mesh)
    _health(config.health)
    _activity(config.activity)
    _kv_share(config.kv_share)
    check_models(config.models, config.gpu, warnings)
    _api_keys(config)
    return warnings


def _api_keys(config: Config) -> None:
    """A slip here would send the mesh secret to a server."""
    for i, model in enumerate(config.models):
        if model.api_key_env and model.api_key_env in (config.mesh.secret_env, config.mesh.secret_prev_env):
            expected = "a variable other than the mesh secrets'"
            raise Fault(f"models[{i}].api_key_env", expected, model.api_key_env)


def _node(node: NodeSection) -> None:
    checks.name("node.name", node.name, limits.NODE_NAME_MAX_BYTES)
    if node.name and (problem := node_name_problem(node.name)):
        raise Fault("node.name", "a name other nodes accept", f"{shown(node.name)}, which {problem}")
    checks.absolute_path("node.state_dir", node.state_dir)


def _api(api: ApiSection, warnings: list[str]) -> None:
    checks.port("api.port", api.port)
    if addresses.ip_literal("api.host", api.host).is_unspecified:
        warnings.append(
            f"api.host {api.host} listens on every network of this machine; requests are not authenticated"
        )
    origins = api.cors.allow_origins or ()
    checks.at_most("api.cors.allow_origins", len(origins), limits.CORS_ORIGINS_MAX, "origins")
    for i, origin in enumerate(origins):
        try:
            parse_pattern(origin)
        except ValueError as error:
            got = shown(origin) or "an empty text"
            raise Fault(f"api.cors.allow_origins[{i}]", str(error), got) from None


def _mesh(config: Config, warnings: list[str]) -> None:
    mesh = config.mesh
    checks.port("mesh.bind_port", mesh.bind_port)
    if mesh.bind_port == config.api.port:
        raise Fault("mesh.bind_port", "a port other than api.port", str(mesh.bind_port))
    for key in ("secret_env", "secret_prev_env"):
        if not checks.is_env_name(getattr(mesh, key)):  # not echoed: it may be the secret itself
            hint = "the name of an environment variable (the secret itself stays out of the file)"
            raise Fault(f"mesh.{key}", hint, "something else")
    if mesh.secret_env == mesh.secret_prev_env:
        raise Fault("mesh.secret_prev_env", "a variable other than mesh.secret_env's", mesh.secret_prev_env)
    if mesh.network == "tailnet" or mesh.tailnet.enabled == "on":
        checks.absolute_path("mesh.tailnet.socket", mesh.tailnet.socket)
    checks.at_most("mesh.seeds", len(mesh.seeds), limits.SEEDS_MAX, "addresses")
    for i, seed in enumerate(mesh.seeds):
        addresses.seed(f"mesh.seeds[{i}]", seed)
    checks.interval("mesh.rejoin_interval", mesh.rejoin_interval)
    checks.interval("mesh.capacity_poll", mesh.capacity_poll)
    _reachable(config, warnings)
    if mesh.open and mesh.network == "lan":
        warnings.append("mesh.open: everyone on this network may join, and membership is not encrypted")


def _reachable(config: Config, warnings: list[str]) -> None:
    """Peers find the API at the address this node advertises."""
    mesh, host = config.mesh, addresses.ip_literal("api.host", config.api.host)
    if not mesh.advertise:
        if host.is_loopback:
            warnings.append(f"api.host {host} is loopback: peers cannot reach this node")
        return
    address = addresses.unicast("mesh.advertise", mesh.advertise)
    if address.is_loopback:
        warnings.append(f"mesh.advertise {address} is loopback: only nodes on this machine can join")
    elif mesh.open and not addresses.in_open_ranges(address):
        warnings.append(f"mesh.advertise {address} is outside the private ranges: an open mesh refuses it")
    if host != address and not (host.is_unspecified and host.version == address.version):
        warnings.append(
            f"api.host {host} is not listening on mesh.advertise {address}, where peers look for it"
        )


def _routing(routing: RoutingSection, mesh: MeshSection) -> None:
    checks.between("routing.queue_max", routing.queue_max, 0, limits.COUNT_MAX)
    checks.between("routing.forward_retry", routing.forward_retry, 0, limits.COUNT_MAX)
    if routing.trace:
        checks.absolute_path("routing.trace", routing.trace)
    if routing.stale_after <= mesh.capacity_poll:  # every peer would be stale most of the time
        expected = f"longer than mesh.capacity_poll ({format_duration(mesh.capacity_poll)})"
        raise Fault("routing.stale_after", expected, format_duration(routing.stale_after))


def _health(health: HealthSection) -> None:
    checks.interval("health.interval", health.interval)
    checks.interval("health.timeout", health.timeout)
    checks.between("health.max_failures", health.max_failures, 1, limits.COUNT_MAX)
    checks.between("health.max_respawns", health.max_respawns, 0, limits.COUNT_MAX)


def _activity(activity: ActivitySection) -> None:
    checks.between("activity.prompt_history", activity.prompt_history, 0, limits.COUNT_MAX)
    checks.between("activity.event_history", activity.event_history, 0, limits.COUNT_MAX)


def _kv_share(kv_share: KvShareSection) -> None:
    if kv_share.dir:
        checks.absolute_path("kv_share.dir", kv_share.dir)
    if kv_share.memory <= 0:
        raise Fault("kv_share.memory", "more than 0 (enabled: false turns sharing off)", str(kv_share.memory))
    checks.between("kv_share.replicas", kv_share.replicas, 1, limits.KV_COPIES_MAX)
    checks.between("kv_share.min_tokens", kv_share.min_tokens, 1, limits.CONTEXT_MAX_TOKENS)
    if not limits.KV_STALL_SHARE_MIN <= kv_share.stall_share <= 1.0:
        expected = f"a share of the time from {limits.KV_STALL_SHARE_MIN} to 1.0"
        raise Fault("kv_share.stall_share", expected, str(kv_share.stall_share))
    if isinstance(kv_share.direct, tuple):
        checks.at_most("kv_share.direct", len(kv_share.direct), limits.SEEDS_MAX, "addresses")
        for i, item in enumerate(kv_share.direct):
            addresses.network(f"kv_share.direct[{i}]", item)
    checks.at_most("kv_share.plain", len(kv_share.plain), limits.SEEDS_MAX, "addresses")
    for i, item in enumerate(kv_share.plain):
        addresses.network(f"kv_share.plain[{i}]", item)
