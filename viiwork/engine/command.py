"""The command line and environment of one llama.cpp backend: pure, everything it needs is passed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from viiwork.config.model import ModelSection
from viiwork.errors import EngineUsageError

Vendor = Literal["nvidia", "amd", "apple", "none"]

# Card choices of the node's own environment would fight with ours.
PINNING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# glibc hands freed memory back: a node's engines live for weeks and share the machine.
MALLOC_ENV = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "4",
}
# Weights this close to the host's memory are read instead of mapped: page faults would evict them in circles.
NO_MMAP_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the command depends on and only the machine knows."""

    cpus: int = 1
    ram_bytes: int = 0  # 0 = unknown
    vendor: Vendor = "none"
    weights_bytes: Mapping[str, int] = field(default_factory=dict)  # models[].path -> bytes of all its shards


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Which optional flags a binary knows; what it does not know is not passed."""

    log_levels: bool = False  # --log-verbosity counts 0..5; older builds read 1 as debug and log prompts
    no_kv_unified: bool = False
    cache_ram: bool = False
    flash_attn_value: bool = False  # takes on|off|auto; older builds know a bare switch
    load_mode: bool = False  # replaced --no-mmap
    no_webui: str = ""  # the spelling it knows
    no_cache_idle_slots: bool = False

    @classmethod
    def from_help(cls, text: str) -> EngineFlags:
        """Read the flags out of what `--help` prints."""
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
        verbosity = _section(text, "--log-verbosity")
        return cls(
            log_levels=bool(re.search(r"^\s*-?\s*0\s*[:=-]", verbosity, re.MULTILINE)),
            no_kv_unified="--no-kv-unified" in known,
            cache_ram="--cache-ram" in known,
            no_cache_idle_slots="--no-cache-idle-slots" in known,
            flash_attn_value=bool(
                re.search(r"--flash-attn[ ,]+\S*(on\b|auto)", _section(text, "--flash-attn"))
            ),
            load_mode="--load-mode" in known,
            no_webui=next((flag for flag in ("--no-webui", "--no-ui") if flag in known), ""),
        )


EMBEDDED_FLAGS = EngineFlags(
    log_levels=True,
    no_kv_unified=True,
    cache_ram=True,
    no_cache_idle_slots=True,
    flash_attn_value=True,
    load_mode=True,
    no_webui="--no-webui",
)


@dataclass(frozen=True, slots=True)
class Command:
    """What to execute, and the whole environment it gets."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def backend_count(model: ModelSection) -> int:
    """How many backends the model gets: one a group of cards, one on the CPU."""
    return max(1, len(model.gpus) // model.gpus_per_backend)


def backend_gpus(model: ModelSection, index: int) -> tuple[int, ...]:
    """The host's cards of one backend, in the order of the config."""
    width = model.gpus_per_backend
    return model.gpus[index * width : (index + 1) * width]


def llamacpp_command(
    model: ModelSection,
    index: int,
    port: int,
    *,
    program: tuple[str, ...],
    flags: EngineFlags,
    facts: HostFacts,
    node_env: Mapping[str, str],
    hidden_env: frozenset[str] = frozenset(),
    save_dir: Path | None = None,
) -> Command:
    """The command of backend `index` on `port`; `program` is the resolved binary.

    Operator arguments come last, so they win. Raises `EngineUsageError` for what can never work.
    """
    path = Path(model.path)
    if path.is_dir():
        raise EngineUsageError(f"model {model.name}: {path} is a directory, expected a .gguf file")
    if not path.is_file():
        raise EngineUsageError(f"model {model.name}: no file {path}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise EngineUsageError(f"model {model.name}: {path} is not a GGUF file")
    options = model.llamacpp
    gpus = backend_gpus(model, index)
    argv = [*program, "--model", str(path.absolute()), "--alias", model.name]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--ctx-size", str(model.context * model.parallel), "--parallel", str(model.parallel)]
    argv += ["--n-gpu-layers", "-1" if gpus else "0", "--slots", "--metrics"]
    if flags.no_kv_unified:
        argv.append("--no-kv-unified")  # one stream a slot: a slot's save-file then holds nobody else's cells
    if flags.no_cache_idle_slots and not {"-kvu", "--kv-unified"}.isdisjoint(model.args):
        # Such an engine clears its idle slots whenever a request begins: nothing would be left to save, and
        # what was restored could be gone before its turn.
        argv.append("--no-cache-idle-slots")
    if flags.no_webui:
        argv.append(flags.no_webui)
    argv += ["--log-verbosity", "1"] if flags.log_levels else ["--log-disable"]
    if save_dir is not None:
        argv += ["--slot-save-path", f"{save_dir}/"]
    argv += ["--cache-type-k", options.cache_type_k, "--cache-type-v", options.cache_type_v]
    argv += _flash_attn(options.flash_attn, flags)
    if options.cache_ram_mib is not None and flags.cache_ram:
        argv += ["--cache-ram", str(options.cache_ram_mib)]
    argv += ["--threads", str(options.threads or max(1, facts.cpus // backend_count(model)))]
    argv += _split(model, gpus)
    weights = facts.weights_bytes.get(model.path, 0)
    if facts.ram_bytes and weights >= NO_MMAP_SHARE * facts.ram_bytes:
        argv += _no_mmap(flags)
    for arg in model.args:
        argv += _no_mmap(flags) if arg == "--no-mmap" else [arg]
    return Command(tuple(argv), _environment(model, gpus, facts.vendor, node_env, hidden_env))


def pinning_env(vendor: Vendor, gpus: tuple[int, ...]) -> dict[str, str]:
    """The variables that show an engine exactly its cards; a backend without cards sees none."""
    cards = ",".join(map(str, gpus))
    if vendor == "nvidia":
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
    if vendor == "amd":
        return {"ROCR_VISIBLE_DEVICES": cards}
    return {}


def wrong_cards(
    gpus: tuple[int, ...], pids: frozenset[int] | set[int], card_pids: Mapping[int, frozenset[int]]
) -> str | None:
    """Why an engine of processes `pids` is on wrong cards; "" when it is not, None when it cannot be told.

    `card_pids` is what the GPU tool shows. It shows nothing of ours in a container with its own process ids.
    """
    used = sorted(card for card, there in card_pids.items() if there & pids)
    if not used:
        return None
    if set(used) <= set(gpus):
        return ""
    own = ", ".join(map(str, gpus)) or "none"
    return f"it runs on cards {', '.join(map(str, used))}, assigned: {own}"


def _environment(
    model: ModelSection,
    gpus: tuple[int, ...],
    vendor: Vendor,
    node_env: Mapping[str, str],
    hidden_env: frozenset[str],
) -> dict[str, str]:
    withheld = hidden_env.union(PINNING_VARIABLES)
    env = {name: value for name, value in node_env.items() if name not in withheld}
    return env | pinning_env(vendor, gpus) | MALLOC_ENV | model.env  # later wins


def _flash_attn(choice: str, flags: EngineFlags) -> list[str]:
    if flags.flash_attn_value:
        return ["--flash-attn", choice]
    return ["--flash-attn"] if choice == "on" else []


def _split(model: ModelSection, gpus: tuple[int, ...]) -> list[str]:
    if len(gpus) < 2:
        return []
    options = model.llamacpp
    weights = options.split_weights or (1.0,) * len(gpus)
    argv = [
        "--split-mode",
        options.split_mode,
        "--tensor-split",
        ",".join(f"{weight:g}" for weight in weights),
    ]
    return [*argv, "--main-gpu", str(options.main_gpu)] if options.split_mode == "row" else argv


def _no_mmap(flags: EngineFlags) -> list[str]:
    return ["--load-mode", "none"] if flags.load_mode else ["--no-mmap"]


def _section(text: str, flag: str) -> str:
    """The help entry of one flag: its line and the indented lines below it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("-") and re.search(rf"{re.escape(flag)}(?![\w-])", line):
            body = [line]
            for follower in lines[number + 1 :]:
                if follower.startswith("-"):
                    break
                body.append(follower)
            return "\n".join(body)
    return ""
