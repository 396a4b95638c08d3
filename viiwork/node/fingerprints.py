"""What two nodes must have in common to exchange states of a model: weights, and args that change results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from viiwork.config.model import ModelSection
from viiwork.errors import ModelFileError
from viiwork.host.gguf import Fingerprints, sliding_window

# Operator args that change speed or looks and never a KV row; with a value each unless marked 0.
_HARMLESS = {
    "-t": 1,
    "--threads": 1,
    "-tb": 1,
    "--threads-batch": 1,
    "--threads-http": 1,
    "-ngl": 1,
    "--gpu-layers": 1,
    "--n-gpu-layers": 1,
    "--prio": 1,
    "--prio-batch": 1,
    "--poll": 1,
    "--numa": 1,
    "-v": 0,
    "--verbose": 0,
    "--log-verbosity": 1,
    "--no-mmap": 0,
    "--mlock": 0,
    "-kvu": 0,
    "--kv-unified": 0,
    "-no-kvu": 0,
    "--no-kv-unified": 0,
    "--cache-ram": 1,
    "-cram": 1,
    "--cache-idle-slots": 0,
    "--no-cache-idle-slots": 0,
    "--ctx-checkpoints": 1,
    "--checkpoint-min-step": 1,
    "--slot-prompt-similarity": 1,
    "--metrics": 0,
    "--no-webui": 0,
    "--jinja": 0,
    "--chat-template": 1,
    "--chat-template-file": 1,
    "--reasoning-format": 1,
}
# What bounds the tokens an engine computes at once, and to how many unless told.
_BATCHES = (
    (("-b", "--batch-size"), "LLAMA_ARG_BATCH", 2048),
    (("-ub", "--ubatch-size"), "LLAMA_ARG_UBATCH", 512),
)


class StateFingerprints:
    """Fingerprints of this node's models, computed once for each version of their files."""

    def __init__(self, models: Sequence[ModelSection]) -> None:
        self._models = {model.name: model for model in models}
        self._files = Fingerprints()

    def configure(self, models: Sequence[ModelSection]) -> None:
        """Other models are configured now."""
        self._models = {model.name: model for model in models}

    async def swa_rows(self, model: str) -> int | None:
        """Rows a slot's sliding-window cache takes: 0 = not known, None = all of its tokens' (`--swa-full`).

        Raises `ModelFileError`.
        """
        section = self._section(model)
        env = {**os.environ, **section.env}
        if "--swa-full" in section.args or env.get("LLAMA_ARG_SWA_FULL"):
            return None
        window = await asyncio.to_thread(sliding_window, Path(section.path))
        return window + micro_batch(section.args, env) if window else 0

    async def of(self, model: str) -> bytes:
        """32 bytes for a configured model. Raises `ModelFileError` for a file that cannot be read."""
        return await asyncio.to_thread(self._of, self._section(model))

    def _section(self, model: str) -> ModelSection:
        section = self._models.get(model)
        if section is None:
            raise ModelFileError(f"{model} is configured no more")
        return section

    def _of(self, model: ModelSection) -> bytes:
        parts = [self._files.fingerprint(Path(model.path))]
        for arg in changing_args(model.args):
            # A file named by an argument (a LoRA, a projector) counts by its content, not by its name.
            counts = arg.endswith(".gguf") and Path(arg).is_file()
            parts.append(self._files.fingerprint(Path(arg)) if counts else arg)
        return blake3("\0".join(parts).encode()).digest()


def changing_args(args: Sequence[str]) -> Iterator[str]:
    """The operator's args without those known to be harmless; an unknown one counts, for safety."""
    skip = 0
    for arg in args:
        if skip:
            skip -= 1
            continue
        flag, has_value, _ = arg.partition("=")
        if flag in _HARMLESS:
            skip = 0 if has_value else _HARMLESS[flag]
            continue
        yield arg


def micro_batch(args: Sequence[str], env: Mapping[str, str]) -> int:
    """Tokens an engine with these arguments computes at once; as few as any of them says."""
    found = []
    for flags, variable, default in _BATCHES:
        said = env.get(variable, "")
        for at, arg in enumerate(args):
            flag, has_value, value = arg.partition("=")
            if flag in flags:
                said = value if has_value else "".join(args[at + 1 : at + 2])
        found.append(int(said) if said.isdecimal() else default)
    return min(found)
