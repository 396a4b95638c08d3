"""Rules of `models`: names, cards, slots and the engine's own block."""

from __future__ import annotations

import re
from collections.abc import Sequence

from viiwork import limits
from viiwork.config import addresses, checks
from viiwork.config.fault import Fault, shown
from viiwork.config.model import GpuSection, LlamacppSection, ModelSection

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_PLAIN_CACHE_TYPES = ("f32", "f16", "bf16")
_LLAMACPP_KEYS = ("path", "gpus", "gpus_per_backend", "startup_timeout", "args", "env", "llamacpp")
_EXTERNAL_KEYS = ("url", "api_key_env", "health", "model")
_PATH = re.compile(r"/[!-~]*")
# What the node decides for a backend; an operator's argument comes last and would win.
# fmt: off
_NODES_OWN_ARGS = frozenset((
    "-m", "--model", "-a", "--alias", "--host", "--port", "-c", "--ctx-size",
    "-np", "--parallel", "--slot-save-path", "--no-slots", "--api-key", "--api-key-file", "--api-prefix",
))
# fmt: on


def check_models(models: Sequence[ModelSection], gpu: GpuSection, warnings: list[str]) -> None:
    """Raises `Fault` for the first broken rule; adds what is legal but rarely meant to `warnings`."""
    checks.at_most("models", len(models), limits.MODELS_MAX, "models")
    names: dict[str, int] = {}
    cards: dict[int, str] = {}
    for i, model in enumerate(models):
        path = f"models[{i}]"
        _model(path, model)
        first = names.setdefault(model.name, i)
        if first != i:
            raise Fault(f"{path}.name", "a name of its own", f"{shown(model.name)} as models[{first}] has")
        _cards(path, model, cards, shared=gpu.vendor == "apple")
        if model.gpus and gpu.vendor == "none":
            warnings.append(f"{path}.gpus are listed but gpu.vendor is none: the cards are not used")
        overridden = sorted({a.partition("=")[0] for a in model.args} & _NODES_OWN_ARGS)
        if overridden:
            warnings.append(f"{path}.args override what the node decides: {', '.join(overridden)}")


def _model(path: str, model: ModelSection) -> None:
    if not model.name:
        raise Fault(f"{path}.name", "a name", "an empty text")
    checks.name(f"{path}.name", model.name, limits.MODEL_NAME_MAX_BYTES)
    is_external = model.engine == "external"
    _only_its_own(path, model, _LLAMACPP_KEYS if is_external else _EXTERNAL_KEYS)
    checks.between(f"{path}.parallel", model.parallel, 1, limits.PARALLEL_MAX)
    most = limits.CONTEXT_MAX_TOKENS // model.parallel
    if is_external:
        checks.between(f"{path}.context", model.context, 0, most)
        _external(path, model)
        return
    if not model.path:
        raise Fault(f"{path}.path", "the model file's absolute path (required)", "nothing")
    checks.absolute_path(f"{path}.path", model.path)
    if model.context == 0:
        raise Fault(f"{path}.context", f"a whole number from 1 to {most} (required)", "0 or nothing")
    checks.between(f"{path}.context", model.context, 1, most)
    checks.between(f"{path}.gpus_per_backend", model.gpus_per_backend, 1, limits.GPU_INDEX_MAX + 1)
    if model.startup_timeout is not None:
        checks.longer_than_zero(f"{path}.startup_timeout", model.startup_timeout)
    for i, arg in enumerate(model.args):
        _no_nul(f"{path}.args[{i}]", arg)
    for key, value in model.env.items():
        if not checks.is_env_name(key):
            raise Fault(f"{path}.env", "names of environment variables", shown(key) or "an empty text")
        _no_nul(f"{path}.env.{key}", value)
    _llamacpp(f"{path}.llamacpp", model.llamacpp, model.gpus_per_backend)


def _only_its_own(path: str, model: ModelSection, foreign: Sequence[str]) -> None:
    """No key of the other kind of engine; one at its default says nothing."""
    plain = ModelSection(name=model.name, engine=model.engine)
    for key in foreign:
        if getattr(model, key) != getattr(plain, key):
            raise Fault(f"{path}.{key}", f"no such key with engine: {model.engine}", "one")


def _external(path: str, model: ModelSection) -> None:
    if not model.url:
        raise Fault(f"{path}.url", "the server's address, as http://host:port (required)", "nothing")
    addresses.http_url(f"{path}.url", model.url)
    if model.api_key_env and not checks.is_env_name(
        model.api_key_env
    ):  # not echoed: it may be the key itself
        hint = "the name of an environment variable (the key itself stays out of the file)"
        raise Fault(f"{path}.api_key_env", hint, "something else")
    if model.health and not _PATH.fullmatch(model.health):
        raise Fault(f"{path}.health", "a path such as /health", shown(model.health))
    if model.model:
        checks.name(f"{path}.model", model.model, limits.MODEL_NAME_MAX_BYTES)


def _no_nul(path: str, text: str) -> None:
    if "\0" in text:
        raise Fault(path, "text without NUL", shown(text))


def _cards(path: str, model: ModelSection, taken: dict[int, str], *, shared: bool) -> None:
    per_backend = model.gpus_per_backend
    for i, card in enumerate(model.gpus):
        checks.between(f"{path}.gpus[{i}]", card, 0, limits.GPU_INDEX_MAX)
        if card in model.gpus[:i]:
            raise Fault(f"{path}.gpus[{i}]", "each card once", f"{card} again")
        owner = taken.setdefault(card, path)
        if owner != path and not shared:
            raise Fault(f"{path}.gpus[{i}]", "a card of no other model", f"{card}, which {owner} has")
    if len(model.gpus) % per_backend:
        expected = f"a divisor of the {len(model.gpus)} cards of {path}.gpus"
        raise Fault(f"{path}.gpus_per_backend", expected, str(per_backend))
    if per_backend > 1 and not model.gpus:
        raise Fault(f"{path}.gpus_per_backend", f"1, since {path}.gpus is empty", str(per_backend))


def _llamacpp(path: str, llamacpp: LlamacppSection, per_backend: int) -> None:
    if not llamacpp.binary.isprintable() or llamacpp.binary != llamacpp.binary.strip():
        raise Fault(f"{path}.binary", "a path, a name or embedded", shown(llamacpp.binary))
    if "/" in llamacpp.binary:
        checks.absolute_path(f"{path}.binary", llamacpp.binary)
    if llamacpp.split_weights:
        n = len(llamacpp.split_weights)
        if per_backend < 2 or n != per_backend:
            expected = f"one weight for each of gpus_per_backend ({per_backend}) cards, two or more"
            raise Fault(f"{path}.split_weights", expected, f"{n} weights")
        for i, weight in enumerate(llamacpp.split_weights):
            if weight <= 0:
                raise Fault(f"{path}.split_weights[{i}]", "more than 0", str(weight))
    checks.between(f"{path}.main_gpu", llamacpp.main_gpu, 0, per_backend - 1)
    checks.between(f"{path}.threads", llamacpp.threads, 0, limits.THREADS_MAX)
    if llamacpp.cache_ram_mib is not None:
        checks.between(f"{path}.cache_ram_mib", llamacpp.cache_ram_mib, -1, limits.RAM_CACHE_MAX_MIB)
    _cache_types(path, llamacpp)


def _cache_types(path: str, llamacpp: LlamacppSection) -> None:
    for key in ("cache_type_k", "cache_type_v"):
        if getattr(llamacpp, key) not in CACHE_TYPES:
            raise Fault(f"{path}.{key}", f"one of {', '.join(CACHE_TYPES)}", shown(getattr(llamacpp, key)))
    if llamacpp.flash_attn == "off" and llamacpp.cache_type_v not in _PLAIN_CACHE_TYPES:
        expected = f"{', '.join(_PLAIN_CACHE_TYPES)} while flash_attn is off (the rest needs it)"
        raise Fault(f"{path}.cache_type_v", expected, llamacpp.cache_type_v)
