"""A node's membership as a process of its own: NAME IP PORT SEED, prints its epoch when it is in."""

import asyncio
import sys

from viiwork.mesh.admission import MeshIdentity
from viiwork.mesh.membership import Membership


async def main(name: str, ip: str, port: str, seed: str) -> None:
    me = MeshIdentity(name=name, addr=ip, port=int(port), api_port=8086, version="0.1.0", loopback_ok=True)
    membership = Membership(me, on_event=lambda event: None)
    await membership.start()
    await membership.join([seed])
    print(membership.local().epoch, flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
