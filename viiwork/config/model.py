"""The typed config: one frozen struct a section, with the documented defaults and no I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from viiwork.limits import GIB


class Seconds(float):
    """A duration; written `60s`, `250ms`, `1m30s` or `0` in the file."""


class Bytes(int):
    """A size; written `8GiB`, `512MiB` or a plain number of bytes in the file."""


class Tri(str):
    """`auto`, `on` or `off`; the file may also say true/false/yes/no."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: unknown keys are errors, values never change."""


class NodeSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""  # "" = host name
    state_dir: str = "/var/lib/viiwork"


class CorsSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    allow_origins: tuple[str, ...] | None = None  # None = this machine and the own tailnet
    allow_tailnet_ips: bool = True  # without a list


class ApiSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "0.0.0.0"
    port: int = 8086
    cors: CorsSection = CorsSection()


class TailnetSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: Tri = Tri("auto")
    socket: str = "/var/run/tailscale/tailscaled.sock"


class LanSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mdns: Tri = Tri("auto")


class MeshSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    network: Literal["tailnet", "lan"] = "tailnet"
    bind_port: int = 7946
    advertise: str = ""
    open: bool = False
    secret_env: str = "VIIWORK_MESH_SECRET"
    secret_prev_env: str = "VIIWORK_MESH_SECRET_PREV"
    secret_enforce: Literal["full", "outgoing", "none"] = "full"
    tailnet: TailnetSection = TailnetSection()
    lan: LanSection = LanSection()
    seeds: tuple[str, ...] = ()
    rejoin_interval: Seconds = Seconds(60)
    capacity_poll: Seconds = Seconds(1)


class RoutingSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue_max: int = 64
    queue_timeout: Seconds = Seconds(20)
    forward_retry: int = 1
    stale_after: Seconds = Seconds(3)
    performance: bool = True
    trace: str = ""  # "" = no arrival trace


class GpuSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    vendor: Literal["auto", "nvidia", "amd", "apple", "none"] = "auto"


class HealthSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    interval: Seconds = Seconds(5)
    timeout: Seconds = Seconds(10)
    max_failures: int = 3
    max_respawns: int = 3
    respawn_grace: Seconds = Seconds(60)


class ActivitySection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt_history: int = 1000
    event_history: int = 2000


class LlamacppSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`models[].llamacpp`."""

    binary: str = ""  # "" = llama-server when on PATH, else embedded when installed
    split_mode: Literal["layer", "row"] = "layer"
    split_weights: tuple[float, ...] = ()
    main_gpu: int = 0
    threads: int = 0  # 0 = CPUs / backends of the model
    cache_ram_mib: int | None = None  # None = the engine's own default; -1 = no limit; 0 = off
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: Tri = Tri("auto")


class ModelSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `models`."""

    name: str
    engine: Literal["llamacpp", "external"]
    path: str = ""  # of llamacpp, and required there
    context: int = 0  # tokens per slot; 0 = not told, which only external may leave open
    gpus: tuple[int, ...] = ()
    gpus_per_backend: int = 1
    parallel: int = 1  # slots per backend
    startup_timeout: Seconds | None = None  # None = the engine's default, 10 min
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""  # of external, like the three below, and required there
    api_key_env: str = ""  # environment variable that holds its key; "" = none is sent
    health: str = ""  # "" = /health, else /v1/models
    model: str = ""  # what the server calls the model; "" = as `name`
    llamacpp: LlamacppSection = LlamacppSection()


class KvShareSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = True
    dir: str = ""  # "" = a private folder under /dev/shm, else state_dir/kv
    memory: Bytes = Bytes(8 * GIB)
    replicas: int = 1
    min_tokens: int = 1024
    direct: Tri | tuple[str, ...] = Tri("auto")
    encrypt: Tri = Tri("auto")
    plain: tuple[str, ...] = ()
    compress: Tri = Tri("auto")
    stall_share: float = 0.05
    open: bool = False


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: NodeSection = NodeSection()
    api: ApiSection = ApiSection()
    mesh: MeshSection = MeshSection()
    routing: RoutingSection = RoutingSection()
    gpu: GpuSection = GpuSection()
    health: HealthSection = HealthSection()
    activity: ActivitySection = ActivitySection()
    kv_share: KvShareSection = KvShareSection()
    models: tuple[ModelSection, ...] = ()
