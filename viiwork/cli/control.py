"""How commands talk to a running node: where it is, with which secret, and one line when it fails."""

from __future__ import annotations

import argparse
import http.client
import ipaddress
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from viiwork.config.fault import Fault, printable
from viiwork.config.load import default_config_path, load_without_secrets
from viiwork.config.model import Config
from viiwork.config.secrets import decode_secret
from viiwork.errors import NodeRefused, NodeUnreachable, UsageError
from viiwork.limits import CONTROL_ANSWER_MAX_BYTES, CONTROL_TIMEOUT_MAX_S, CONTROL_TIMEOUT_S
from viiwork.mesh.notices import one_line
from viiwork.mesh.values import host_port
from viiwork.wire.signature import NONCE_BYTES, sign

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", re.ASCII)
_PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
_NOT_IN_A_SIGNER = re.compile(r"[^A-Za-z0-9._-]", re.ASCII)
_NOT_JSON = object()
_LOOPBACK = {4: "127.0.0.1", 6: "::1"}


def add_control_arguments(parser: argparse.ArgumentParser) -> None:
    """The options every command has that talks to a running node."""
    parser.add_argument(
        "--node",
        type=_address,
        metavar="HOST:PORT",
        help="the node to talk to (default: this machine's, at the api.port of its config, else 8086)",
    )
    add_secret_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=CONTROL_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the node may take to answer (default: %(default)g)",
    )


def add_secret_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the config and the mesh's secret are."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help=f"the node's config file (default: {default_config_path()} where there is one)",
    )
    parser.add_argument(
        "--secret-env",
        metavar="NAME",
        help="the environment variable with the mesh's secret (default: mesh.secret_env of the config)",
    )


@dataclass(frozen=True, slots=True)
class _Secret:
    """Where the mesh's secret may stand; its text is looked at when something has to be signed."""

    variable: str
    env: Mapping[str, str]

    def key(self) -> bytes | None:
        try:
            return decode_secret("the mesh's secret", self.variable, self.env)
        except Fault as fault:
            raise UsageError(str(fault)) from None


def secrets_of(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """The mesh's secret, and behind it the previous one; () = none, an open mesh."""
    config = _config(args.config)
    found = (_Secret(name, env).key() for name in (_variable(args, config, env), config.mesh.secret_prev_env))
    return tuple(secret for secret in found if secret is not None)


def own_address_of(args: argparse.Namespace) -> tuple[str, int]:
    """Where this machine's node listens, by the config that was named or its own."""
    return _own_address(_config(args.config))


class ControlClient:
    """Asks one node; every failure is a `ViiworkError` whose text is one line for the operator.

    Paths are sent as they are, so names in them must be percent-encoded. Proxies are not used and
    redirects not followed.
    """

    def __init__(self, host: str, port: int, secret: _Secret, timeout_s: float) -> None:
        self._host = host
        self._port = port
        self._secret = secret
        self._timeout_s = timeout_s

    @classmethod
    def from_args(cls, args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> Self:
        """The client that `add_control_arguments` describes; reads the config only for what was not said."""
        all_said = args.node is not None and args.secret_env is not None and args.config is None
        config = Config() if all_said else _config(args.config)
        secret = _Secret(_variable(args, config, env), env)
        host, port = args.node or _own_address(config)
        return cls(host, port, secret, args.timeout)

    def other(self, address: str, timeout_s: float) -> ControlClient:
        """The same for another node, at its `host:port`. Raises `NodeUnreachable` for what is no address."""
        try:
            host, port = _address(address)
        except argparse.ArgumentTypeError as error:
            raise NodeUnreachable(str(error)) from None
        return ControlClient(host, port, self._secret, timeout_s)

    @property
    def address(self) -> str:
        """`host:port` of the node, for messages."""
        return host_port(self._host, self._port)

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises `NodeUnreachable` or `NodeRefused`."""
        return self._ask("GET", path, b"", {})

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """Make a change, signed when there is a secret; the JSON of the answer, None when it has no body.

        `body` is a JSON value, None for a request without a body. Raises as `get` does, and `UsageError`
        for a secret that is none.
        """
        raw = b"" if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        key = self._secret.key()
        if key is not None:
            nonce = os.urandom(NONCE_BYTES)
            headers |= sign(key, _signer(), method, path, raw, now_unix_s=time.time(), nonce=nonce)
        return self._ask(method, path, raw, headers)

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
            with _cut_after(self._timeout_s, connection.sock):
                connection.request(method, path, body or None, {**headers, "Connection": "close"})
                with connection.getresponse() as answer:
                    raw = answer.read(CONTROL_ANSWER_MAX_BYTES + 1)
        except TimeoutError:
            raise self._unreachable(f"no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from None
        except http.client.HTTPException as error:
            raise self._unreachable(f"what answers there is no node ({type(error).__name__})") from None
        finally:
            connection.close()
        if len(raw) > CONTROL_ANSWER_MAX_BYTES:
            raise self._unreachable(f"its answer is larger than {CONTROL_ANSWER_MAX_BYTES} bytes")
        try:
            value = json.loads(raw) if raw or answer.status != 204 else None
        except (ValueError, RecursionError):
            value = _NOT_JSON
        if answer.status >= 300:
            raise self._refused(answer.status, value)
        if value is _NOT_JSON or answer.length:
            raise self._unreachable("what answers there is no node (its answer is not whole, or not JSON)")
        return value

    def _unreachable(self, why: str) -> NodeUnreachable:
        return NodeUnreachable(
            f"no node could be asked at {self.address}: {one_line(why)}; "
            "name another one with --node host:port"
        )

    def _refused(self, status: int, answer: Any) -> NodeRefused:
        error = answer.get("error") if isinstance(answer, dict) else None
        said = error.get("message") if isinstance(error, dict) else None
        text = one_line(said) if isinstance(said, str) and said else "it gave no reason"
        return NodeRefused(f"{self.address} refused (HTTP {status}): {text}{self._hint(status)}", status)

    def _hint(self, status: int) -> str:
        variable = printable(self._secret.variable)[:64]
        if status == 401 and self._secret.key() is None:
            return f"; put the mesh's secret into {variable}, or name its variable with --secret-env"
        if status == 401:
            return f"; it was signed with the secret from {variable}"
        if status == 403:
            return f"; an open mesh takes changes only on the node's machine, --node 127.0.0.1:{self._port}"
        return ""


def _config(path: Path | None) -> Config:
    """The config that was named; else this machine's own if there is one to read, else the defaults."""
    if path is not None:
        return load_without_secrets(path)
    default = default_config_path()
    return load_without_secrets(default) if os.access(default, os.R_OK) else Config()


def _variable(args: argparse.Namespace, config: Config, env: Mapping[str, str]) -> str:
    """The environment variable of the mesh's secret; one that was named has to be there."""
    if args.secret_env and not env.get(args.secret_env, "").strip():
        raise UsageError(
            f"--secret-env: the environment variable {printable(args.secret_env)[:64]} is not set"
        )
    return args.secret_env or config.mesh.secret_env


def _own_address(config: Config) -> tuple[str, int]:
    """Where this machine's node listens; loopback where it does, because an open mesh asks for that."""
    host = ipaddress.ip_address(config.api.host)
    return _LOOPBACK[host.version] if host.is_unspecified else str(host), config.api.port


def _signer() -> str:
    return "viiwork-cli@" + _NOT_IN_A_SIGNER.sub("-", socket.gethostname())[:253]


@contextmanager
def _cut_after(timeout_s: float, sock: socket.socket) -> Iterator[None]:
    """Bound the whole exchange: a socket's own timeout bounds only each read."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
    if late.is_set():
        raise TimeoutError


def _address(text: str) -> tuple[str, int]:
    """`host:port`, IPv6 as `[ip]:port`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        with suppress(ValueError):
            ipaddress.IPv6Address(host)
            if "%" not in host and _port_fits(port):
                return host, int(port)
    elif _HOST.fullmatch(host) and _port_fits(port):
        return host, int(port)
    raise argparse.ArgumentTypeError(
        f"expected host:port such as 192.168.1.5:8086 or [fd00::5]:8086, got {one_line(text)[:64]!r}"
    )


def _port_fits(text: str) -> bool:
    return _PORT.fullmatch(text) is not None and int(text) <= 65535


def _seconds(text: str) -> float:
    with suppress(ValueError):
        value = float(text)
        if math.isfinite(value) and 0 < value <= CONTROL_TIMEOUT_MAX_S:
            return value
    raise argparse.ArgumentTypeError(
        f"expected seconds between 0 and {CONTROL_TIMEOUT_MAX_S:g}, got {one_line(text)[:64]!r}"
    )
