"""What two nodes must have in common to exchange states of a model: weights, and args that change results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from viiwork.config.model import ModelSection
from viiwork.errors import ModelFileError
from viiwork.host.gguf import Fingerprints

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


class StateFingerprints:
    """Fingerprints of this node's models, computed once for each version of their files."""

    def __init__(self, models: Sequence[ModelSection]) -> None:
        self._models = {model.name: model for model in models}
        self._files = Fingerprints()

    def configure(self, models: Sequence[ModelSection]) -> None:
        """Other models are configured now."""
        self._models = {model.name: model for model in models}

    async def of(self, model: str) -> bytes:
        """32 bytes for a configured model. Raises `ModelFileError` for a file that cannot be read."""
        section = self._models.get(model)
        if section is None:
            raise ModelFileError(f"{model} is configured no more")
        return await asyncio.to_thread(self._of, section)

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
