"""Which path goes where: exact paths, and prefixes whose rest is a name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from aiohttp import web

from viiwork.errors import MethodNotAllowed, NotFound

# Called with the request and the path it was found by; a prefix route gets the raw path, for a name may
# hold anything a path may.
Handler = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse]]
# The same for a control write, with its whole body, after the caller proved that he may.
ControlHandler = Callable[[web.BaseRequest, str, bytes], Awaitable[web.StreamResponse]]

GET = ("GET", "HEAD")
POST = ("POST",)


@dataclass(frozen=True, slots=True)
class Route:
    """One path and the methods it takes. `/v1/models/*` takes every path below it, but not the bare one."""

    path: str
    methods: tuple[str, ...]
    handler: Handler


@dataclass(frozen=True, slots=True)
class ControlRoute:
    """A write that changes the node or the mesh: only for those who prove that they may."""

    path: str
    methods: tuple[str, ...]
    handler: ControlHandler


AnyRoute = Route | ControlRoute


class RouteTable:
    """Finds the route of a request target."""

    def __init__(self, routes: Iterable[AnyRoute]) -> None:
        self._exact: dict[str, dict[str, AnyRoute]] = {}
        self._below: dict[str, dict[str, AnyRoute]] = {}  # prefix with its last slash
        for route in routes:
            is_prefix = route.path.endswith("/*")
            table = self._below if is_prefix else self._exact
            by_method = table.setdefault(route.path[:-1] if is_prefix else route.path, {})
            for method in route.methods:
                if by_method.setdefault(method, route) is not route:
                    raise ValueError(f"two routes for {method} {route.path}")

    def find(self, method: str, target: str) -> tuple[str, AnyRoute]:
        """Path and route of a raw request target. Raises `NotFound` or `MethodNotAllowed`."""
        found = self._exact.get(target)
        if found is not None and method in found:
            return target, found[method]
        path = target.partition("#")[0].partition("?")[0]
        if not path.startswith("/"):
            path = _path_of_absolute(path)
        found = self._exact.get(path)
        below = self._prefixed(path)
        if found is None or (below is not None and method in below and method not in found):
            found = below  # `/v1/models/down` takes a POST, and is to GET a model of that name
        if found is None:
            path = "/" + "/".join(filter(None, path.split("/")))  # `/v1//models`, `/v1/models/`
            found = self._exact.get(path) or self._prefixed(path)
        if found is None:
            raise NotFound(f"there is no {path[:200]} here")
        return path, _of_method(method, path, found)

    def _prefixed(self, path: str) -> dict[str, AnyRoute] | None:
        for prefix, found in self._below.items():
            if path.startswith(prefix) and path != prefix:
                return found
        return None


def _of_method(method: str, path: str, found: dict[str, AnyRoute]) -> AnyRoute:
    route = found.get(method)
    if route is None:
        raise MethodNotAllowed(f"{path} takes {', '.join(found)}, not {method}", allow=tuple(found))
    return route


def _path_of_absolute(target: str) -> str:
    """Path of an absolute-form target such as `http://host/v1/models`."""
    _, mark, rest = target.partition("://")
    return f"/{rest.partition('/')[2]}" if mark else target
