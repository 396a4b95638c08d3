"""A stand-in for llama-server that answers every path: JSON for JSON, 400 for the rest, streams if asked."""

import json
import logging
import sys

from aiohttp import web


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


N_SLOTS = int(argument("--parallel", "1"))
N_CTX = int(argument("--ctx-size", "0")) // N_SLOTS


def error(message: str) -> web.Response:
    fault = {"message": message, "type": "invalid_request_error", "code": "400"}
    return web.json_response({"error": fault}, status=400)


async def answer(request: web.Request) -> web.StreamResponse:
    if request.path == "/slots":
        return web.json_response([{"id": i, "n_ctx": N_CTX, "is_processing": False} for i in range(N_SLOTS)])
    if request.method == "GET":
        return web.json_response({"status": "ok"})
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        return error("not JSON")
    if not isinstance(body, dict):
        return error("no object")
    if body.get("stream") is not True:
        usage = {"prompt_tokens": 5, "completion_tokens": 1}
        return web.json_response({"choices": [], "content": "x", "id_slot": 0, "usage": usage})
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for _ in range(3):
        await stream.write(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    await stream.write(b"data: [DONE]\n\n")
    return stream


def main() -> None:
    if "--help" in sys.argv:
        print("an engine for fuzzing")
        return
    logging.disable()  # clients that leave are what it is here for
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    port = int(argument("--port"))
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
