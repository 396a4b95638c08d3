"""`/metrics`: the node's figures in Prometheus' text format."""

from __future__ import annotations

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from viiwork.api.routes import GET, AnyRoute, Route

_KIND = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Renders what one collector yields; each scrape asks it anew."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)

    def routes(self) -> list[AnyRoute]:
        return [Route("/metrics", GET, self.metrics)]

    async def metrics(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": _KIND, "Server": "viiwork"})
