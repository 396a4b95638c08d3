"""The node: what is started in which order, what hears whom, and how all of it ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import time
from contextlib import AsyncExitStack
from functools import partial

import aiohttp

from viiwork.api.app import ApiServer
from viiwork.api.metrics import Metrics
from viiwork.api.streams import ActivityRoutes, MeshRoutes
from viiwork.config.load import LoadedConfig
from viiwork.core.sessions import Binding
from viiwork.core.stalls import StallWatch
from viiwork.core.turn import Grant, Outcome
from viiwork.engine.slots import SlotsClient
from viiwork.engine.supervisor import BackendView, Supervisor
from viiwork.errors import MeshError, PortTaken
from viiwork.host.gpus import card_pids
from viiwork.host.network import port_owner
from viiwork.kv.client import KvWorker
from viiwork.limits import ENGINES_STOP_S, STALL_LOOK_S, STALL_S
from viiwork.mesh.origins import MeshOrigins
from viiwork.mesh.peer import PeerClient
from viiwork.mesh.values import host_port
from viiwork.node.activity import NodeActivity, unix_ms
from viiwork.node.cluster import Cluster
from viiwork.node.dispatch import Dispatcher
from viiwork.node.facts import NodeFacts
from viiwork.node.fingerprints import StateFingerprints
from viiwork.node.hub import MeshHub
from viiwork.node.kv_push import KvPeers
from viiwork.node.kv_share import KvShare
from viiwork.node.machine import cpu_seconds, machine_facts
from viiwork.node.mesh import NodeMesh
from viiwork.node.metrics import NodeCollector, RequestCounts
from viiwork.node.paths import Folders, open_folders
from viiwork.node.request_log import RequestLog
from viiwork.node.requests import RequestListeners
from viiwork.version import VERSION

log = logging.getLogger(__name__)


class Node:
    """One viiwork on one machine."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self._loaded = loaded
        self._config = loaded.config
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
            ending.push_async_callback(self._supervisor.stop, ENGINES_STOP_S)
            ending.push_async_callback(self._kv.stop)
            ending.push_async_callback(self._stop_api)
            api_socket = self._bind_api()
            host, port = await self._api.listen("", 0, sock=api_socket)
            log.info("api.listening url=http://%s:%d node=%s version=%s", host, port, self.name, VERSION)
            await self._kv.start()
            facts = await asyncio.to_thread(machine_facts, self._config)
            for model in self._config.models:
                if model.gpus and facts.vendor == "none":
                    log.warning(
                        "%s: no GPU tool found here, gpus %s may not be there", model.name, model.gpus
                    )
            await self._supervisor.start(facts, partial(card_pids, facts.vendor))
            ending.push_async_callback(self._drain)
            ending.push_async_callback(self._mesh.leave)
            tasks = [
                asyncio.create_task(self._join_mesh(), name="mesh"),
                asyncio.create_task(self._dispatcher.wake_regularly(), name="wake"),
                asyncio.create_task(self._watch_stalls(), name="stalls"),
            ]
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
        keys = tuple(key for key in (secret.current, secret.previous) if key is not None)
        hidden = frozenset((config.mesh.secret_env, config.mesh.secret_prev_env))
        self._engine_http = aiohttp.ClientSession(
            # llama.cpp closes idle connections after 5 s; a POST must not meet a closed one.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        self._activity = NodeActivity(config.activity.event_history)
        self._dispatcher = Dispatcher(
            self.name, config.routing, prepare=self._prepare, on_end=self._turn_ended
        )
        self._supervisor = Supervisor(
            config.models,
            health=config.health,
            run_dir=folders.run,
            save_root=folders.saves,
            hidden_env=hidden,
            in_flight=self._dispatcher.slots.in_flight,
            on_change=self._backend_changed,
        )
        self._peer_client = PeerClient(self.name, keys)
        self._mesh = NodeMesh(
            self.name,
            self._loaded,
            keys,
            self._peer_client,
            self._dispatcher,
            self._on_fatal,
            self._activity.member_changed,
        )
        origins = MeshOrigins(self.name, keys, self._peer_client, self._mesh.member)
        worker = KvWorker(
            folders.replicas or folders.run / "replicas",
            int(config.kv_share.memory),
            hidden_env=hidden,
            on_lost=self._worker_lost,
        )
        self._kv = KvShare(
            config.kv_share,
            worker,
            KvPeers(self.name, secret.current, self._peer_client, self._mesh.member),
            keys,
            origins,
            self._dispatcher,
            StateFingerprints(config.models).of,
            lambda url, n_slots: SlotsClient(url, self._engine_http, n_slots),
        )
        node_id = f"viiwork-{secrets.token_hex(8)}"
        sections = {"mesh": self._mesh.status, "kv_share": self._kv.status}
        self._facts = NodeFacts(
            self.name,
            node_id,
            config,
            self._dispatcher,
            backends=self._supervisor.views,
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
            own_room=self._facts.capacity,
        )
        counts = RequestCounts()
        collector = NodeCollector(
            counts.tally,
            info={"node": self.name, "version": VERSION},
            report=self._facts.report,
            backends=self._supervisor.views,
            members=self._mesh.others,
            peers=self._dispatcher.peers.reports,
            blocks={"dispatch": self._facts.requests}
            | {name: sections[name] for name in ("sessions", "kv_share") if name in sections},
        )
        self._api = ApiServer(
            self._dispatcher,
            origins,
            self._facts,
            self._kv.receiver,
            routes=[
                *ActivityRoutes(self._activity.log, unix_ms).routes(),
                *MeshRoutes(self._hub).routes(),
                *Metrics(collector).routes(),
            ],
            requests=RequestListeners(counts, self._activity, RequestLog()),
        )
        self._epochs: dict[str, int] = {}
        self._told: set[str] = set()  # backends whose context was looked at since they started

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
        if not grant.is_forward:
            match outcome.result:
                case "done":
                    self._supervisor.succeeded(grant.backend)
                case "stalled":
                    self._supervisor.stalled(grant.backend)
                case "unreachable" | "broken":
                    self._supervisor.hard_failure(grant.backend, outcome.detail or outcome.result)
        self._kv.turn_ended(grant, outcome, binding)

    async def _watch_stalls(self) -> None:
        """Give up requests an engine has lost, so that they run elsewhere and the engine is replaced."""
        watch = StallWatch(STALL_S)
        while True:
            await asyncio.sleep(STALL_LOOK_S)
            now = time.monotonic()
            for view in self._supervisor.views():
                watch.looked(view.id, view.busy, cpu_seconds(view.pid), now)
            for request_id in watch.lost(self._dispatcher.running(), now):
                self._api.inference.abandon(request_id, "its engine took it and is idle")

    def _backend_changed(self, view: BackendView) -> None:
        if self._epochs.get(view.id) != view.epoch:
            self._epochs[view.id] = view.epoch
            self._dispatcher.sessions.engine_restarted(view.id)
            self._told.discard(view.id)
        if view.status == "healthy" and view.id not in self._told:
            self._told.add(view.id)
            wanted = next(m.context for m in self._config.models if m.name == view.model)
            if view.ctx < wanted:
                log.warning(
                    "backend.context %s: %d tokens a slot, not the configured %d", view.id, view.ctx, wanted
                )
        self._dispatcher.slots.put_backend(
            view.id,
            model=view.model,
            url=view.url or "",
            n_slots=view.n_slots,
            routable=view.status == "healthy" and view.url is not None,
        )
        self._kv.backend_changed(view)
        self._activity.backend_changed(view)
        self._dispatcher.wake()

    def _worker_lost(self) -> None:
        self._kv.worker_restarted()

    def _on_fatal(self, error: MeshError) -> None:
        self._failed = True  # and membership has said why
        self._stopping.set()

    async def _join_mesh(self) -> None:
        try:
            await self._mesh.start()
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
        loop.add_signal_handler(signal.SIGHUP, lambda: log.warning("config.unchanged: restart to reload it"))

    def _on_stop_signal(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _drain(self) -> None:
        """Take no more requests, and let those under way end."""
        self._dispatcher.drain()  # the API goes on listening, so that newcomers are told instead of cut off
        idle, hurry = (
            asyncio.ensure_future(self._dispatcher.idle()),
            asyncio.ensure_future(self._hurry.wait()),
        )
        grace_s = self._config.health.respawn_grace
        await asyncio.wait((idle, hurry), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()

    async def _stop_api(self) -> None:
        self._activity.log.close()
        self._hub.close()
        await self._api.stop(0.0 if self._hurry.is_set() else 1.0)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
