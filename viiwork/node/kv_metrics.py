"""kv_share's figures as Prometheus' metric families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from viiwork.core.replicas import ReplicaTable
from viiwork.kv.client import KvWorker
from viiwork.node.kv_paths import KvPaths
from viiwork.node.kv_stats import KvStats
from viiwork.node.metric_families import counter, gauge, histogram, single


@dataclass(frozen=True, slots=True)
class KvMetrics:
    """Reads what the parts of kv_share know when it is scraped."""

    stats: KvStats
    replicas: ReplicaTable
    worker: KvWorker
    paths: KvPaths
    is_active: Callable[[], bool]

    def families(self) -> Iterator[Metric]:
        yield gauge("viiwork_kv_share_active", "1 while states are shared.", {(): int(self.is_active())})
        yield gauge("viiwork_kv_share_replicas", "States of sessions held here.", {(): len(self.replicas)})
        yield gauge("viiwork_kv_share_replica_bytes", "Of them.", {(): self.replicas.n_bytes})
        worker = self.worker.stats()
        yield gauge("viiwork_kv_share_worker_up", "1 while the worker serves.", {(): int(worker.up)})
        yield counter("viiwork_kv_share_worker_restarts", "Of the worker.", {(): worker.restarts})
        rates = {link["peer"]: link["mb_per_s"] * 1e6 for link in self.paths.status()}
        yield gauge(
            "viiwork_kv_share_link_bytes_per_second",
            "What the best path to the peer is believed to carry.",
            single(rates),
            "peer",
        )
        yield from self._of_transfers()
        yield from self._of_peers()
        yield from self._of_moves()

    def _of_transfers(self) -> Iterator[Metric]:
        tallies = self.stats.tallies()
        yield counter(
            "viiwork_kv_share_transfers",
            "States that were sent, received, restored into a slot, or kept from a save of this node.",
            {(what,): tally.done for what, tally in tallies.items()},
            "what",
        )
        for name, text in (("failed", "Those that failed."), ("skipped", "Those that were not begun.")):
            yield counter(
                f"viiwork_kv_share_{name}",
                text,
                {
                    (what, why): n
                    for what, tally in tallies.items()
                    for why, n in getattr(tally, name).items()
                },
                "what",
                "reason",
            )
        yield counter(
            "viiwork_kv_share_tokens",
            "Tokens of those states, and how many of them were there already.",
            {
                (what, which): n
                for what, tally in tallies.items()
                for which, n in (("all", tally.tokens), ("kept", tally.kept))
            },
            "what",
            "which",
        )
        yield counter(
            "viiwork_kv_share_bytes",
            "Of whole states, of what moved of them, and of that on the wire.",
            {
                (what, which): n
                for what, tally in tallies.items()
                for which, n in (
                    ("state", tally.state_bytes),
                    ("raw", tally.raw_bytes),
                    ("wire", tally.wire_bytes),
                )
            },
            "what",
            "which",
        )
        yield counter(
            "viiwork_kv_share_stage_seconds",
            "Spent in each stage; stages of two threads overlap.",
            {(what, stage): s for what, tally in tallies.items() for stage, s in tally.stages_s.items()},
            "what",
            "stage",
        )
        yield histogram(
            "viiwork_kv_share_transfer_seconds",
            "Of one transfer, without queue and save.",
            {(what,): tally.took for what, tally in tallies.items()},
            "what",
        )
        yield histogram(
            "viiwork_kv_share_transfer_wire_bytes",
            "Of one transfer.",
            {(what,): tallies[what].on_wire for what in ("send", "receive")},
            "what",
        )

    def _of_peers(self) -> Iterator[Metric]:
        peers = self.stats.by_peer
        yield counter(
            "viiwork_kv_share_peer_transfers",
            "By the peer they went to or came from.",
            {
                (peer, what, result): n
                for (peer, what), tally in peers.items()
                for result, n in (("done", tally.done), ("failed", tally.failed))
            },
            "peer",
            "what",
            "result",
        )
        yield counter(
            "viiwork_kv_share_peer_wire_bytes",
            "By the peer they went to or came from.",
            {(peer, what): tally.wire_bytes for (peer, what), tally in peers.items() if what != "import"},
            "peer",
            "what",
        )

    def _of_moves(self) -> Iterator[Metric]:
        stats = self.stats
        yield counter(
            "viiwork_kv_share_moves",
            "First turns after a change of host, on the host the session came to.",
            {(how,): stats.moves[how] for how in ("warm", "partly", "cold")},
            "how",
        )
        yield counter(
            "viiwork_kv_share_not_warm", "Why they were not warm.", single(stats.not_warm_causes), "cause"
        )
        yield counter(
            "viiwork_kv_share_reused_tokens", "Of their prompts, not read anew.", {(): stats.reused_tokens}
        )
        yield counter(
            "viiwork_kv_share_stall_seconds",
            "Saves and restores stopped all slots of the engine.",
            single(stats.stall_s),
            "backend",
        )
