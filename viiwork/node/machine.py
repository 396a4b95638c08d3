"""The machine as the engines need to know it: cards, CPUs, memory, sizes of the model files."""

from __future__ import annotations

from pathlib import Path

import psutil

from viiwork.config.model import Config
from viiwork.engine.command import HostFacts
from viiwork.errors import ModelFileError
from viiwork.host.cpus import usable_cpus
from viiwork.host.gguf import weights_bytes
from viiwork.host.gpus import detect_vendor


def machine_facts(config: Config) -> HostFacts:
    """Looks; blocks while a GPU tool answers, some seconds at worst."""
    weights: dict[str, int] = {}
    for model in config.models:
        try:
            weights[model.path] = weights_bytes(Path(model.path))
        except ModelFileError:
            continue  # its backend will say so, with the reason
    return HostFacts(
        cpus=usable_cpus(),
        ram_bytes=psutil.virtual_memory().total,
        vendor=detect_vendor(config.gpu.vendor),
        weights_bytes=weights,
    )
