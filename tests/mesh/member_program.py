"""A node's membership as a process of its own: NAME IP PORT SEED.

Prints its epoch when it listens, then a line for everything it hears about others.
"""

import asyncio
import sys

from viiwork.mesh.admission import MeshIdentity
from viiwork.mesh.membership import Membership


async def main(name: str, ip: str, port: str, seed: str) -> None:
    me = MeshIdentity(
        name=name, addr=ip, port=int(port), api_port=8086, version="0.1.0", loopback_ok=ip.startswith("127.")
    )
    membership = Membership(me, on_event=lambda e: print(e.kind, e.member.name, e.member.addr, flush=True))
    await membership.start()
    print(membership.local().epoch, flush=True)
    await membership.join([seed])
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
