"""Members send each other messages: best effort, of members only, and a listener's bug stops nothing."""

from __future__ import annotations

import asyncio

import pytest

PATIENCE_S = 30.0


@pytest.mark.parametrize("keys", [(), (b"k" * 32,)], ids=["open", "secured"])
async def test_small_and_large_messages_arrive_with_their_senders_name(start_node, heard, keys):
    a = await start_node("a", "127.0.0.1", keys=keys)
    b = await start_node("b", "127.0.0.2", a, keys=keys, options={"on_message": heard})
    await a.heard.event("joined", "b")
    await b.heard.event("joined", "a")
    small, large = b"\x02small", b"\x02" + bytes(range(256)) * 240
    await a.membership.send("b", small)
    await heard.until(lambda item: item == ("a", small))
    await a.membership.send("b", large)
    await heard.until(lambda item: item == ("a", large))


async def test_what_cannot_be_sent_is_nobodys_fault(start_node):
    a = await start_node("a", "127.0.0.1")
    await a.membership.send("nobody", b"\x02x")
    b = await start_node("b", "127.0.0.2", a)
    await a.heard.event("joined", "b")
    await a.membership.send("b", b"\x02nobody listens there")
    await b.membership.stop()
    await a.heard.event("left", "b")
    await a.membership.send("b", b"\x02x")
    await a.membership.stop()
    await a.membership.send("b", b"\x02x")


async def test_a_member_that_was_not_let_in_is_not_listened_to(start_node, heard):
    a = await start_node("a", "127.0.0.1", options={"on_message": heard})
    # Its metadata says a version of the mesh that is not ours.
    b = await start_node("b", "127.0.0.2", a, api_port=0)
    c = await start_node("c", "127.0.0.3", a)
    await c.heard.event("joined", "a")
    await a.heard.event("joined", "c")
    async with asyncio.timeout(PATIENCE_S):
        while b.membership.member("a") is None:
            await asyncio.sleep(0.01)
    assert a.membership.member("b") is None
    await b.membership.send("a", b"\x02from b")
    await c.membership.send("a", b"\x02from c")
    await heard.until(lambda item: item == ("c", b"\x02from c"))
    await c.membership.send("a", b"\x02again")
    await heard.until(lambda item: item == ("c", b"\x02again"))
    assert all(name == "c" for name, _ in heard.items)


async def test_a_listeners_bug_does_not_end_membership(start_node, caplog):
    got = asyncio.Event()

    def broken(name: str, data: bytes) -> None:
        if data == b"\x02last":
            got.set()
        raise ValueError("a bug")

    a = await start_node("a", "127.0.0.1", options={"on_message": broken})
    b = await start_node("b", "127.0.0.2", a)
    await a.heard.event("joined", "b")
    await b.heard.event("joined", "a")
    await b.membership.send("a", b"\x02first")
    await b.membership.send("a", b"\x02last")
    async with asyncio.timeout(PATIENCE_S):
        await got.wait()
    assert "a listener failed on a message of b" in caplog.text and not a.fatal.items
