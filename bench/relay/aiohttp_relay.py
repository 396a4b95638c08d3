"""A bare relay of aiohttp's own server and client, without a node's duties: what the library alone costs."""

from __future__ import annotations

import argparse
import asyncio
import gc

import aiohttp
import uvloop
from aiohttp import web


async def serve(port: int, backend: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(auto_decompress=False, connector=connector) as http:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with http.post(backend + request.path_qs, data=body, headers=headers) as upstream:
                answer = web.StreamResponse(status=upstream.status)
                answer.content_type = upstream.content_type
                answer.content_length = upstream.content_length
                await answer.prepare(request)
                async for data in upstream.content.iter_any():
                    await answer.write(data)
                await answer.write_eof()
                return answer

        app = web.Application()
        app.router.add_post("/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        gc.freeze()
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", required=True)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.backend))
