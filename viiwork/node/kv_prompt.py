"""What a request's prompt has in common with a state, in tokens, as the engine itself makes them.

A dense state is cut by the engine wherever the prompt leaves it. Of the others only what was kept is of use,
so the file is rendered to fit, and that takes the number of tokens the prompt shares.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from array import array
from dataclasses import dataclass

import msgspec

from viiwork.core.replicas import Replica
from viiwork.core.turn import Ask
from viiwork.engine.slots import SlotsClient
from viiwork.errors import ViiworkError
from viiwork.kv.client import KvWorker
from viiwork.limits import KV_PROMPT_S, KV_TOKENS_MAX
from viiwork.node.kv_layouts import EngineLayout

log = logging.getLogger(__name__)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class _Completion(msgspec.Struct):
    prompt: str | list[int]


_completions = msgspec.json.Decoder(_Completion)


@dataclass(slots=True)
class _Prompt:
    path: str
    body: bytes
    tokens: bytes | None = None  # little-endian i32; None until they are asked for, b"" = cannot be known


class Prompts:
    """The bodies of the requests that are under way. They are borrowed, so they take no memory of their own;
    tokens, where they are needed, take four bytes each and go with the request.
    """

    def __init__(self, worker: KvWorker) -> None:
        self._worker = worker
        self._prompts: dict[str, _Prompt] = {}

    def put(self, request_id: str, path: str, body: bytes) -> None:
        """See `api.ports.Prompts.put`."""
        self._prompts[request_id] = _Prompt(path, body)

    def forget(self, request_id: str) -> None:
        """See `api.ports.Prompts.forget`."""
        self._prompts.pop(request_id, None)

    async def common_tokens(self, ask: Ask, layout: EngineLayout, replica: Replica) -> int | None:
        """How many leading tokens the request shares with a replica.

        None when the engine finds that itself, or when it is not known in time.
        """
        if layout.cuts_anywhere:
            return None
        prompt = self._prompts.get(ask.request_id)
        if prompt is None or len(prompt.body) != ask.body_bytes:  # a peer may name two requests alike
            return None
        try:
            async with asyncio.timeout(KV_PROMPT_S):
                if prompt.tokens is None:
                    prompt.tokens = packed(await _tokens(prompt, layout.client))
                if not prompt.tokens:
                    return None
                return await self._worker.common_tokens(replica.name, prompt.tokens)
        except (ViiworkError, TimeoutError) as error:
            log.info(
                "kv_share.prompt_unknown request=%s: %s", ask.request_id, str(error) or "it took too long"
            )
            return None


async def _tokens(prompt: _Prompt, client: SlotsClient) -> list[int]:
    """The tokens of a prompt; none where no endpoint of the engine tells them."""
    if prompt.path == CHAT:
        text = await client.templated(prompt.body, KV_PROMPT_S)
        return await client.tokenized(text, KV_PROMPT_S)
    if prompt.path != COMPLETION:
        return []
    try:
        found = _completions.decode(prompt.body).prompt
    except msgspec.MsgspecError:
        return []  # several prompts, or none
    return await client.tokenized(found, KV_PROMPT_S) if isinstance(found, str) else found


def packed(tokens: list[int]) -> bytes:
    """As little-endian i32; nothing where one of them is none."""
    try:
        words = array("i", tokens[:KV_TOKENS_MAX])
    except OverflowError:
        return b""
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
