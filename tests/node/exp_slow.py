from __future__ import annotations
import asyncio, time, uuid, contextlib
import aiohttp, pytest
from tests.fakes.netns import Lan, ip
from .lan import lan_node, running, until_all_see_all, state_of
from .links import SECRET, shape
from .nodes import model_entry
from .test_two_nodes import chat, opening, reused_share, said

pytestmark = [pytest.mark.netns, pytest.mark.engine]


async def test_x(tmp_path, smollm2, http):
    with Lan(2) as lan:
        small, share = model_entry("small", smollm2), "kv_share: {min_tokens: 64}"
        env = {"VIIWORK_MESH_SECRET": SECRET, "VIIWORK_DEBUG": "1"}
        nodes = [lan_node(lan, i, tmp_path, small, extra=share, env=env) for i in range(2)]
        with running(*nodes):
            await until_all_see_all(http, nodes)
            for n in nodes:
                await n.until_healthy(http)
            for n in nodes:
                await n.until_sees(http, "small", 2)
            import subprocess

            for netns in lan.names:
                subprocess.run(
                    [
                        "tc",
                        "-n",
                        netns,
                        "qdisc",
                        "replace",
                        "dev",
                        "eth0",
                        "root",
                        "tbf",
                        "rate",
                        "1mbit",
                        "burst",
                        "16kb",
                        "latency",
                        "3000ms",
                    ],
                    check=True,
                )
            messages, session = opening(400), uuid.uuid4().hex
            t0 = time.monotonic()
            first = await chat(http, nodes[0], messages, session)
            print("first", time.monotonic() - t0, first["timings"])
            end = time.monotonic() + 40
            while time.monotonic() < end:
                t = time.monotonic()
                try:
                    s = await nodes[1].status(http)
                    f = await nodes[0].get(http, "/v1/fleet/capacity")
                    print(
                        round(t - t0, 1),
                        "status+fleet",
                        round(time.monotonic() - t, 3),
                        s["kv_share"]["received"]["done"],
                        s["kv_share"]["received"]["failed"],
                        state_of(s, "n0"),
                        [
                            (h["node"], h.get("age_s"), h.get("slots"))
                            for m in f["models"]
                            for h in m["hosts"]
                        ],
                    )
                except Exception as e:
                    print(round(t - t0, 1), "ERR", repr(e), round(time.monotonic() - t, 3))
                await asyncio.sleep(1)
            print((await nodes[0].status(http))["kv_share"]["last"])
            for n in nodes:
                print("==", n.name)
                print(n.log[-3500:])
