"""The published settings on one machine: two namespaces, shaped links, and both ends of the measurement."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from viiwork.bench.janitor import Janitor
from viiwork.bench.link import COMPRESSED, LAB_WAYS, PLAIN, Progress, Way
from viiwork.bench.listen import memory_folder
from viiwork.bench.near import Errand, Told
from viiwork.bench.net import CABLE, SWITCH, LabNet
from viiwork.bench.results import Phase
from viiwork.bench.states import BenchState, make_state
from viiwork.bench.tunnel import OVERLAY_NAME, Tunnel
from viiwork.errors import BenchError
from viiwork.limits import BENCH_PORT
from viiwork.wire.channel import mesh_key

_SECRET = "VIIWORK_LAB_SECRET"
_VETH = "the link: a veth pair of this machine, shaped by tbf, both hosts on the same CPUs"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the published study, and the send time it reports."""

    name: str
    device: str
    mbps: int
    emulated: tuple[str, ...]
    published_s: float | None = None  # for 247 MiB
    ways: tuple[Way, ...] = LAB_WAYS


SETTINGS = (
    Setting("switched 1 GbE", SWITCH, 1_000, (_VETH, "the switch: there is none"), 3.24),
    Setting(
        "10 GbE through a tunnel",
        SWITCH,
        3_200,
        (_VETH, "the tunnel: the link held to the 3.2 Gb/s that Tailscale carried"),
        0.81,
    ),
    Setting("10 GbE direct", CABLE, 10_000, (_VETH,), 0.55),
    # The first one's rate again: whether it is the same is told by two ways, and the lab stays short.
    Setting("direct, forced to 1 GbE", CABLE, 1_000, (_VETH,), ways=(PLAIN, COMPRESSED)),
)
_TUNNELED = 1  # the setting that --overlay makes real
_CARRIER_MBPS = 10_000  # the link under a real tunnel


def run_lab(
    *,
    size_bytes: int,
    file: Path | None,
    folder: Path | None,
    runs: int,
    overlay: str | None,
    progress: Progress,
) -> list[Phase]:
    """A phase of each setting. Raises `BenchError`; nothing of the lab is left in any case."""
    with ExitStack() as ending:
        janitor = Janitor()
        ending.callback(janitor.close)
        net = ending.enter_context(LabNet(janitor))
        # What both ends make lies here as well: their own janitors end with the namespaces.
        work = Path(tempfile.mkdtemp(prefix="viiwork-lab-", dir=folder))
        janitor.owes_folder(work)
        memory = Path(tempfile.mkdtemp(prefix="viiwork-lab-", dir=memory_folder()))
        janitor.owes_folder(memory)
        state = BenchState(file, None, 0) if file is not None else make_state(work, size_bytes)
        secret = os.urandom(32)
        ending.enter_context(_far_end(net, secret, memory))
        lab = _Lab(net, state, runs, mesh_key(secret), work, progress)
        tunneled = SETTINGS[_TUNNELED] if overlay else None
        return [lab.measure(setting, overlay if setting is tunneled else None) for setting in SETTINGS]


@dataclass(frozen=True, slots=True)
class _Lab:
    """What all settings have in common."""

    net: LabNet
    state: BenchState
    runs: int
    key: bytes
    work: Path
    progress: Progress

    def measure(self, setting: Setting, overlay: str | None) -> Phase:
        net = self.net
        net.unplug(CABLE if setting.device == SWITCH else SWITCH)
        if overlay != OVERLAY_NAME:
            net.shape(setting.device, setting.mbps)
            phase = self._run_near(self._errand(setting, net.far.address(setting.device)))
            return msgspec.structs.replace(phase, emulated=list(setting.emulated))
        net.shape(setting.device, _CARRIER_MBPS)
        with Tunnel(net, setting.device) as tunnel:
            phase = self._run_near(self._errand(setting, tunnel.far_address))
        return msgspec.structs.replace(phase, emulated=[_VETH], link_mbps=None)

    def _errand(self, setting: Setting, addr: str) -> Errand:
        state = self.state
        return Errand(
            name=setting.name,
            addr=addr,
            port=BENCH_PORT,
            key=self.key,
            link_mbps=setting.mbps,
            state=str(state.path.resolve()),
            base=str(state.base.resolve()) if state.base is not None else None,
            held=state.held,
            runs=self.runs,
            ways=setting.ways,
        )

    def _run_near(self, errand: Errand) -> Phase:
        command = self.net.near.command(sys.executable, "-m", "viiwork.bench.near")
        env = {**os.environ, "TMPDIR": str(self.work)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as near:
            try:
                assert near.stdin is not None and near.stdout is not None
                near.stdin.write(msgspec.json.encode(errand) + b"\n")
                near.stdin.flush()
                for line in near.stdout:
                    told = msgspec.json.decode(line, type=Told)
                    if told.error:
                        raise BenchError(f"{errand.name}: {told.error}")
                    if told.phase is not None:
                        return told.phase
                    if told.plan:
                        self.progress.plan(told.plan)
                    else:
                        self.progress.step(told.step)
            finally:
                near.terminate()
        raise BenchError(f"{errand.name}: the sending process ended with {near.returncode}")


@contextmanager
def _far_end(net: LabNet, secret: bytes, folder: Path) -> Iterator[None]:
    """`viiwork bench kvshare --listen` on the far host."""
    words = ["-m", "viiwork", "bench", "kvshare", "--listen", "--port", str(BENCH_PORT)]
    words += ["--secret-env", _SECRET, "--dir", str(folder)]
    env = {**os.environ, _SECRET: base64.b64encode(secret).decode()}
    command = net.far.command(sys.executable, *words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env) as far:
        try:
            assert far.stdout is not None
            first = far.stdout.readline().decode(errors="replace").strip()
            if not first.startswith("listening"):
                raise BenchError(f"the far end does not start: {first}")
            yield
        finally:
            far.terminate()
