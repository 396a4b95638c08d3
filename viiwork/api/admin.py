"""Read-only routes: what the node knows about itself and the mesh, as JSON."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from aiohttp import web

from viiwork.api.ports import Facts
from viiwork.api.routes import GET, AnyRoute, Route
from viiwork.api.server import json_answer
from viiwork.errors import NotFound

MODELS_PATH = "/v1/models"


class Admin:
    """Handlers of the GET routes."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def routes(self) -> list[AnyRoute]:
        return [
            Route("/health", GET, self.health),
            Route(MODELS_PATH, GET, self.models),
            Route("/models", GET, self.models),
            Route(f"{MODELS_PATH}/*", GET, self.model),
            Route("/v1/model/info", GET, self.model_info),
            Route("/v1/capacity", GET, self.capacity),
            Route("/v1/fleet/capacity", GET, self.fleet_capacity),
            Route("/v1/status", GET, self.status),
        ]

    async def health(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        status, body = self._facts.health()
        return json_answer(status, body)

    async def models(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, {"object": "list", "data": self._facts.models()})

    async def model(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """One listed model; `path` is the raw one, for a name may hold anything a path may."""
        return json_answer(200, self._find(path[len(MODELS_PATH) + 1 :]))

    async def model_info(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, {"data": self._facts.model_info()})

    async def capacity(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        known = request.query.get("holdings", "")
        rev = int(known) if known.isascii() and known.isdigit() and len(known) < 20 else None
        return json_answer(200, self._facts.capacity(rev))

    async def fleet_capacity(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, self._facts.fleet_capacity(request.query.get("model") or None))

    async def status(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        return json_answer(200, self._facts.status())

    def _find(self, name: str) -> dict[str, Any]:
        listed = {model["id"]: model for model in self._facts.models()}
        # Undecoded only then: a listed name may itself look percent-encoded.
        found = listed.get(unquote(name, errors="surrogateescape")) or listed.get(name)
        if found is None:
            raise NotFound(f"no model {name[:200]!r} is served here or by a peer")
        return found
