"""Sends a state over the best path to a peer, and over the next one when that breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec

from viiwork.core.paths import Path
from viiwork.errors import ChannelRefused, KvError
from viiwork.kv.client import KvWorker
from viiwork.kv.jobs import SendDone, SendJob
from viiwork.limits import LINK_SUPERSEDE_S, LINK_SUPERSEDE_TRIES
from viiwork.mesh.values import Member
from viiwork.node.kv_paths import KvPaths, OpenedPath

log = logging.getLogger(__name__)

PATH_FAULTS = ("link_lost", "timeout", "corrupt", "wrong_key", "wrong_peer")  # another path may do better


@dataclass(frozen=True, slots=True)
class Sent:
    """A state that arrived, and how."""

    done: SendDone
    path: Path
    encrypted: bool


def _over(job: SendJob, used: OpenedPath) -> SendJob:
    return msgspec.structs.replace(job, encrypt=used.encrypt, link_bytes_per_s=used.bytes_per_s)


async def send_over(paths: KvPaths, worker: KvWorker, member: Member, offer: bytes, job: SendJob) -> Sent:
    """Send, each path at most once; `job.encrypt` is decided by the path.

    Raises `ChannelRefused` when the peer says no or cannot be reached, and `KvError`.
    """
    broken: list[Path] = []
    n_busy = 0
    while True:
        try:
            used = await paths.open(member, offer, without=broken)
        except ChannelRefused as error:
            if not broken or error.status:
                raise
            raise KvError("link_lost", f"no path to {member.name} works: {error}") from error
        began = time.monotonic()
        try:
            done = await worker.send(used.sock, _over(job, used))
        except KvError as error:
            if broken and error.reason == "busy" and n_busy < LINK_SUPERSEDE_TRIES:
                n_busy += 1
                await asyncio.sleep(LINK_SUPERSEDE_S)  # the peer has not noticed yet that the path broke
                continue
            if error.reason not in PATH_FAULTS:
                raise
            log.info("kv_share.rerouted peer=%s from=%s: %s", member.name, used.path.addr, error)
            paths.failed(member, used.path, str(error))
            broken.append(used.path)
            if set(paths.ranked(member)) <= set(broken):
                raise
        else:
            paths.sent(member, used.path, done.wire_bytes, time.monotonic() - began)
            return Sent(done, used.path, used.encrypt)
