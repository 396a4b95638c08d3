"""The mesh secrets: named in the config, held by the environment, never shown."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from viiwork.config.fault import Fault
from viiwork.config.model import Config, MeshSection, ModelSection
from viiwork.limits import API_KEY_MAX_CHARS

SECRET_BYTES = 32
_SECRET_CHARS = 44  # base64 of 32 bytes, padding included
_SHORTEST_SECRET = 16  # characters


@dataclass(frozen=True, slots=True)
class MeshSecrets:
    current: bytes | None = field(default=None, repr=False)
    previous: bytes | None = field(default=None, repr=False)


def read_secrets(mesh: MeshSection, env: Mapping[str, str]) -> MeshSecrets:
    """The secrets of a secured mesh, none of an open one; raises `Fault` for both and for neither."""
    current = decode_secret("mesh.secret_env", mesh.secret_env, env)
    previous = decode_secret("mesh.secret_prev_env", mesh.secret_prev_env, env)
    if mesh.open and current is not None:
        got = f"an open mesh and a secret in {mesh.secret_env}"
        raise Fault("mesh.open", "either mesh.open: true or a secret", got)
    if previous is not None and current is None:
        got = f"the previous secret alone, in {mesh.secret_prev_env}"
        raise Fault("mesh.secret_prev_env", f"a current secret in {mesh.secret_env}", got)
    if not mesh.open and current is None:
        expected = f"a secret in the environment variable {mesh.secret_env}, or mesh.open: true"
        raise Fault("mesh.secret_env", expected, "neither")
    if mesh.secret_enforce != "full":
        expected = (
            "full (gossip is encrypted both ways or not at all: restart the nodes of an open mesh together)"
        )
        raise Fault("mesh.secret_enforce", expected, mesh.secret_enforce)
    return MeshSecrets(current, previous)


def decode_secret(path: str, variable: str, env: Mapping[str, str]) -> bytes | None:
    """The 32 bytes in `variable`; an unset or blank variable is no secret."""
    text = env.get(variable, "").strip()
    if not text:
        return None
    expected = f"the standard base64 of {SECRET_BYTES} bytes in {variable}"
    if len(text) != _SECRET_CHARS:
        hint = " (quotes included)" if text[0] in "\"'" else ""
        hint = " (a byte order mark included)" if text[0] == "\ufeff" else hint
        raise Fault(path, expected, f"{len(text)} characters{hint} instead of {_SECRET_CHARS}")
    try:
        secret = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        hint = " (the URL-safe alphabet?)" if "-" in text or "_" in text else ""
        raise Fault(path, expected, f"characters that base64 does not have{hint}") from None
    if len(secret) != SECRET_BYTES:
        raise Fault(path, expected, f"{len(secret)} bytes")
    return secret


def read_api_keys(models: Sequence[ModelSection], env: Mapping[str, str]) -> dict[str, str]:
    """The keys of external servers by the variables that hold them; raises `Fault` for one without."""
    keys = {}
    for i, model in enumerate(models):
        if not model.api_key_env:
            continue
        path, key = f"models[{i}].api_key_env", env.get(model.api_key_env, "").strip()
        if not key:
            raise Fault(path, f"a key in the environment variable {model.api_key_env}", "none")
        if not (key.isascii() and key.isprintable()) or " " in key or len(key) > API_KEY_MAX_CHARS:
            expected = f"at most {API_KEY_MAX_CHARS} visible ASCII characters in {model.api_key_env}"
            raise Fault(path, expected, "something else")
        keys[model.api_key_env] = key
    return keys


def refuse_in_file(config: Config, env: Mapping[str, str], data: bytes) -> None:
    """Raises `Fault` when a secret of the environment also stands in the file, which is shown and shared."""
    mesh = config.mesh
    variables = {"mesh.secret_env": mesh.secret_env, "mesh.secret_prev_env": mesh.secret_prev_env}
    for i, model in enumerate(config.models):
        variables[f"models[{i}].api_key_env"] = model.api_key_env
    for path, variable in variables.items():
        text = env.get(variable, "").strip().encode(errors="surrogateescape")
        # Shorter ones ("none", "ollama") are placeholders, and stand in any text.
        at = data.find(text) if len(text) >= _SHORTEST_SECRET else -1
        if at >= 0:
            line = data.count(b"\n", 0, at) + 1
            raise Fault(path, f"the secret in {variable} alone", "it in this file too", line=line)
