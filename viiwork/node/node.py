"""The node: what is started in which order, what hears whom, and how all of it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from viiwork.api.aliases import AliasApi
from viiwork.api.app import ApiServer
from viiwork.api.bench import Bench
from viiwork.api.kv import Kv
from viiwork.api.metrics import Metrics
from viiwork.api.park import Park
from viiwork.api.probe import Probes
from viiwork.api.pull import PullRoutes
from viiwork.api.streams import ActivityRoutes, MeshRoutes
from viiwork.api.why import Why
from viiwork.config.load import LoadedConfig
from viiwork.core.sessions import Binding
from viiwork.core.turn import Grant, Outcome
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import Supervisor
from viiwork.errors import MeshError, PortTaken
from viiwork.host.gpus import card_pids
from viiwork.host.network import link_addresses, port_owner
from viiwork.kv.client import KvWorker
from viiwork.limits import (
    ENGINES_STOP_S,
)
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.tailscale import tailnet_suffix
from viiwork.mesh.values import MemberEvent, host_port
from viiwork.node.activity import NodeActivity
from viiwork.node.alias_store import AliasStore
from viiwork.node.aliases import Aliases
from viiwork.node.backends import Backends, hidden_env, host_facts
from viiwork.node.bench_end import BenchEnd
from viiwork.node.clock import wall_ms
from viiwork.node.cluster import Cluster
from viiwork.node.dispatch import Dispatcher, policy_of
from viiwork.node.facts import NodeFacts
from viiwork.node.fingerprints import StateFingerprints
from viiwork.node.hub import MeshHub
from viiwork.node.kv_listing import KvListing
from viiwork.node.kv_paths import LinkHost
from viiwork.node.kv_share import KvShare
from viiwork.node.kv_targets import KvPeers
from viiwork.node.listeners import Listeners
from viiwork.node.mesh import NodeMesh
from viiwork.node.metrics import Block, NodeCollector, RequestCounts
from viiwork.node.park import Parking
from viiwork.node.paths import Folders, open_folders
from viiwork.node.perf import PerfFile
from viiwork.node.reload import Reloader
from viiwork.node.request_log import RequestLog
from viiwork.node.requests import RequestListeners
from viiwork.node.trace import TraceFile
from viiwork.node.web_pages import WebPages
from viiwork.version import VERSION

log = logging.getLogger(__name__)


class Node:
    """One viiwork on one machine."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._reloader = Reloader(loaded, os.environ, lambda new: self._backends.apply_models(new))
        self.name = loaded.config.node.name or socket.gethostname()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()  # a second signal: wait for nothing
        self._failed = False

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or a fatal error; the answer is the exit code."""
        self._catch_signals()  # before anything slow: a default action would end the process unclean
        folders = open_folders(self._config)
        try:
            return await self._serve(folders)
        finally:
            folders.close()

    async def _serve(self, folders: Folders) -> int:
        self._build(folders)
        async with AsyncExitStack() as ending:
            # Run from the last to the first, each whatever becomes of the others, also when the start fails.
            ending.push_async_callback(self._engine_http.close)
            await self._peer_client.start()
            ending.push_async_callback(self._peer_client.stop)
            ending.push_async_callback(self._cluster.stop)
            ending.push_async_callback(self._hub.stop)
            ending.push_async_callback(self._bench_end.stop)
            ending.push_async_callback(self._stop_engines)
            ending.push_async_callback(self._kv.stop)
            ending.push_async_callback(self._stop_api)
            api_socket = self._bind_api()
            host, port = await self._api.listen("", 0, sock=api_socket)
            log.info("api.listening url=http://%s:%d node=%s version=%s", host, port, self.name, VERSION)
            await self._kv.start()
            facts = await host_facts(self._config)
            await self._perf.configured(self._config.models)
            ending.push_async_callback(self._perf.save, now=True)
            if self._trace is not None:
                ending.push_async_callback(self._trace.flush)
            await self._supervisor.start(facts, partial(card_pids, facts.vendor))
            ending.push_async_callback(self._drain)
            ending.push_async_callback(self._mesh.leave)
            tasks = [
                asyncio.create_task(self._join_mesh(), name="mesh"),
                asyncio.create_task(self._mesh.aliases.run(), name="aliases"),
                asyncio.create_task(self._dispatcher.wake_regularly(), name="wake"),
                asyncio.create_task(self._backends.watch_stalls(), name="stalls"),
                asyncio.create_task(self._reloader.run(), name="reload"),
                asyncio.create_task(self._pages.follow_tailnet(), name="pages"),
                asyncio.create_task(self._perf.run(), name="perf"),
                asyncio.create_task(self._kv.paths.run(), name="paths"),
            ]
            if self._trace is not None:
                tasks.append(asyncio.create_task(self._trace.run(), name="trace"))
            for task in tasks:
                task.add_done_callback(self._task_ended)
                ending.push_async_callback(_cancel, task)
            await self._stopping.wait()
            log.info("node.stopping grace_s=%.0f", self._config.health.respawn_grace)
        log.info("node.stopped")
        return 1 if self._failed else 0

    # -- building ------------------------------------------------------------------------------------
    def _build(self, folders: Folders) -> None:
        config, secret = self._config, self._loaded.secrets
        alias_store = AliasStore.open(folders.state, wall_ms())  # first: it may end the start
        keys = tuple(dict.fromkeys(key for key in (secret.current, secret.previous) if key is not None))
        hidden = hidden_env(self._loaded)
        self._engine_http = aiohttp.ClientSession(
            # llama.cpp closes idle connections after 5 s; a POST must not meet a closed one.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._activity = NodeActivity(config.activity.event_history)
        policy, trace = policy_of(config.routing), config.routing.trace
        self._trace = TraceFile(Path(trace), self.name, policy, wall_ms=wall_ms) if trace else None
        self._dispatcher = Dispatcher(
            self.name,
            config.routing,
            prepare=self._prepare,
            on_end=self._turn_ended,
            ask_peers=lambda: self._mesh.ask_peers(),
            on_decided=self._trace.add if self._trace is not None else None,
        )
        self._perf = PerfFile(folders.state, self._dispatcher.speeds, wall_s=time.time)
        self._supervisor = Supervisor(
            config.models,
            health=config.health,
            run_dir=folders.run,
            save_root=folders.saves,
            hidden_env=hidden,
            in_flight=self._dispatcher.slots.in_flight,
            on_change=lambda view: self._backends.changed(view),
            occupied=lambda backend: self._kv.occupies(backend),
            on_gone=lambda backend, model: self._backends.gone(backend, model),
            before_end=lambda backend: self._kv.hand_over(backend),
            api_keys=self._loaded.api_keys,
        )
        for model in config.models:
            self._dispatcher.slots.add_model(model.name)  # before its first backend has loaded
        self._peer_client = PeerClient(self.name, keys)
        aliases = Aliases(
            self.name,
            alias_store,
            known=self._dispatcher.knows,
            served=self._dispatcher.is_served,
            on_write=lambda name, entry: self._mesh.aliases.written(name, entry),
            on_event=lambda line: self._activity.note("alias", line),
        )
        listeners = Listeners(lambda ip, port: self._api.listen(ip, port), config.api.host, config.api.port)
        self._mesh = NodeMesh(
            self.name,
            self._loaded,
            keys,
            self._peer_client,
            self._dispatcher,
            self._on_fatal,
            aliases,
            listeners.at_mesh,
            self._member_changed,
        )
        origins = MeshOrigins(
            self.name,
            keys,
            self._peer_client,
            self._mesh.known,
            is_at=lambda name, ip: self._kv.paths.is_at(name, ip),
        )
        fingerprints = StateFingerprints(config.models)
        worker = KvWorker(
            folders.replicas or folders.run / "replicas",
            int(config.kv_share.memory),
            hidden_env=hidden,
            on_lost=self._worker_lost,
        )
        self._kv = KvShare(
            config.kv_share,
            worker,
            KvPeers(self.name, self._peer_client, self._mesh.member),
            keys,
            origins,
            self._dispatcher,
            fingerprints,
            folders.state,
            lambda url, n_slots: SlotsClient(url, self._engine_http, n_slots),
            LinkHost(link_addresses, listeners.hears),
        )
        node_id = f"viiwork-{secrets.token_hex(8)}"
        sections = {
            "sessions": self._dispatcher.book.status,
            "mesh": self._mesh.status,
            "kv_share": self._kv.status,
        }
        self._facts = NodeFacts(
            self.name,
            node_id,
            config,
            self._dispatcher,
            aliases=aliases,
            supervisor=self._supervisor,
            addr=lambda: self._mesh.addr,
            kv_identity=self._kv.identity,
            sections=sections,
        )
        self._cluster = Cluster(
            self.name,
            self._peer_client,
            members=self._mesh.others,
            own_status=self._facts.status,
            own_api=self._own_api,
            models=self._facts.models,
            secured=bool(keys),
        )
        self._hub = MeshHub(
            self.name,
            node_id,
            self._activity.log,
            self._cluster,
            self._peer_client,
            members=self._mesh.others,
            own_api=self._own_api,
            own_status=self._facts.status,
            own_room=self._facts.report,
            aliases=aliases.listing,
        )
        counts = RequestCounts()
        collector = NodeCollector(
            counts.tally,
            info={"node": self.name, "version": VERSION},
            report=self._facts.report,
            backends=self._supervisor.views,
            members=self._mesh.others,
            peers=self._dispatcher.peers.reports,
            blocks={
                "dispatch": Block(self._facts.requests, frozenset({"leases", "forwards", "sessions"})),
                "sessions": Block(sections["sessions"], frozenset({"open", "hit_rate"})),
            },
            more=[self._kv.metrics],
        )
        kv_listing = KvListing(
            self.name,
            self._dispatcher.sessions,
            self._dispatcher.book.replicas,
            self._kv.paths.status,
            wall_ms=wall_ms,
        )
        self._bench_end = BenchEnd(keys, hidden)
        self._pages = WebPages(config, tailnet_suffix)
        self._api = ApiServer(
            self._dispatcher,
            origins,
            self._facts,
            self._kv.receiver,
            [
                *AliasApi(aliases).routes(),
                *Park(Parking(self.name, self._supervisor)).routes(),
                *Why(self.name, self._dispatcher.receipts, policy).routes(),
                *ActivityRoutes(self._activity.log, wall_ms).routes(),
                *MeshRoutes(self._hub).routes(),
                *Metrics(collector).routes(),
                *Probes(self._kv.paths).routes(),
                *Bench(self._bench_end).routes(),
                *PullRoutes(self._kv.pulls).routes(),
                *Kv(kv_listing).routes(),
            ],
            requests=RequestListeners(counts, self._activity, RequestLog()),
            external=self._supervisor.external,
            prompts=self._kv.prompts,
            allows_origin=self._pages.allows,
        )
        self._backends = Backends(
            config,
            self._supervisor,
            self._dispatcher,
            self._kv,
            self._activity,
            self._perf,
            fingerprints,
            self._api.inference.abandon,
        )

    def _bind_api(self) -> socket.socket:
        host, port = self._config.api.host, self._config.api.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            owner = port_owner(port, "tcp")
            by = f" (held by {owner})" if owner else ""
            raise PortTaken(f"API port {host}:{port}/tcp cannot be used: {error.strerror}{by}") from error
        return sock

    # -- what the parts tell one another -------------------------------------------------------------
    def _own_api(self) -> str:
        return host_port(self._mesh.addr, self._config.api.port) if self._mesh.addr else ""

    async def _prepare(self, grant: Grant) -> None:
        await self._kv.prepare(grant)

    def _turn_ended(self, grant: Grant, outcome: Outcome, binding: Binding | None) -> None:
        self._backends.turn_ended(grant, outcome)
        self._kv.turn_ended(grant, outcome, binding)

    def _member_changed(self, event: MemberEvent) -> None:
        self._activity.member_changed(event)
        if event.kind in ("dead", "left"):
            self._kv.peer_gone(event.member.name)

    def _worker_lost(self) -> None:
        self._kv.worker_restarted()

    def _on_fatal(self, error: MeshError) -> None:
        self._failed = True  # and membership has said why
        self._stopping.set()

    async def _join_mesh(self) -> None:
        try:
            await self._mesh.run()
        except MeshError as error:
            log.error("%s", error)
            self._on_fatal(error)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A node half of which stands still would be worse than one that is started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("node.failed in its task %s", task.get_name(), exc_info=error)
            self._failed = True
            self._stopping.set()

    # -- ending --------------------------------------------------------------------------------------
    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal)
        # The default action of SIGHUP would end the node, and a supervisor would call that a clean stop.
        loop.add_signal_handler(signal.SIGHUP, self._reloader.ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one that came before is heard now

    def _on_stop_signal(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _drain(self) -> None:
        """Take no more requests, let those under way end, and hand the sessions over."""
        self._dispatcher.drain()  # the API goes on listening, so that newcomers are told instead of cut off
        until = time.monotonic() + self._config.health.respawn_grace
        at_rest = asyncio.create_task(self._kv.hand_over())  # sessions that need not wait for what runs
        await self._within(until, self._dispatcher.idle())
        await self._within(until, self._kv.hand_over())
        await _cancel(at_rest)

    async def _within(self, until: float, work: Coroutine[Any, Any, None]) -> None:
        """Await it for no longer than this, and not beyond a second signal."""
        ends, hurry = asyncio.create_task(work), asyncio.create_task(self._hurry.wait())
        left_s = max(until - time.monotonic(), 0.0)
        await asyncio.wait((ends, hurry), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if ends.done():
            ends.result()
        await _cancel(ends)

    async def _stop_engines(self) -> None:
        """A second signal, also one that comes meanwhile, ends their grace."""
        log.info("engines.stopping")
        stopping = asyncio.ensure_future(
            self._supervisor.stop(0.0 if self._hurry.is_set() else ENGINES_STOP_S)
        )
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not stopping.done():
            await self._supervisor.stop(0.0)
        await stopping

    async def _stop_api(self) -> None:
        self._activity.log.close()
        self._hub.close()
        await self._api.stop(0.0 if self._hurry.is_set() else 1.0)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
