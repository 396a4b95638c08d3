from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from viiwork.config.model import LlamacppSection, ModelSection
from viiwork.core.capacity import Perf
from viiwork.core.score import Baseline, Speeds
from viiwork.limits import PERF_FILE_MAX_BYTES
from viiwork.node.perf import PerfFile


class Bed:
    """One state folder, and node after node that uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wall_s = 1000.0
        weights = folder / "m.gguf"
        weights.write_bytes(b"weights")
        self.model = ModelSection(name="m", engine="llamacpp", path=str(weights), context=1)
        self.path = folder / "perf.json"

    async def node(self, *models: ModelSection) -> tuple[Speeds, PerfFile]:
        speeds = Speeds()
        perf = PerfFile(self.folder, speeds, wall_s=lambda: self.wall_s)
        await perf.configured(models or (self.model,))
        return speeds, perf

    def measure(self, speeds: Speeds, per_1k_s: float = 3.0) -> None:
        for n_tokens in (10, 20, 30, 1000, 2000, 3000, 4000, 5000):
            speeds.sample("m", 0.2 + per_1k_s * n_tokens / 1000, n_tokens, 5.0)
        speeds.perf("m", 5.0)  # as every decision does

    async def measured(self) -> None:
        speeds, perf = await self.node()
        self.measure(speeds)
        await perf.save()


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


async def test_what_was_measured_is_known_after_a_restart(bed: Bed):
    await bed.measured()
    speeds, _ = await bed.node()
    assert speeds.perf("m", 0.0) == Perf(200.0, 3000.0, 0)
    assert [path.name for path in bed.folder.iterdir() if path.suffix != ".gguf"] == ["perf.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"args": ("--flash-attn",)},
        {"gpus": (1,)},
        {"path": "/elsewhere.gguf"},
        {"llamacpp": LlamacppSection(threads=7)},
        {"env": {"HIP": "1"}},
    ],
)
async def test_a_model_that_changed_is_measured_anew(bed: Bed, change):
    await bed.measured()
    speeds, _ = await bed.node(msgspec.structs.replace(bed.model, **change))
    assert speeds.perf("m", 0.0) is None


async def test_new_weights_in_the_same_file_are_measured_anew(bed: Bed):
    await bed.measured()
    Path(bed.model.path).write_bytes(b"other weights")
    speeds, _ = await bed.node()
    assert speeds.perf("m", 0.0) is None


async def test_a_longer_start_up_is_no_other_speed(bed: Bed):
    await bed.measured()
    speeds, _ = await bed.node(msgspec.structs.replace(bed.model, startup_timeout=7.0))
    assert speeds.perf("m", 0.0) is not None


async def test_a_changed_configuration_keeps_what_did_not_change(bed: Bed):
    speeds, perf = await bed.node()
    bed.measure(speeds)
    other = msgspec.structs.replace(bed.model, name="n")
    await perf.configured((bed.model, other))
    assert speeds.perf("m", 5.0) == Perf(200.0, 3000.0, 8)
    await perf.configured((msgspec.structs.replace(bed.model, gpus=(0,)), other))
    assert speeds.perf("m", 9.0) is None
    await perf.configured((other,))
    assert speeds.models() == ["n"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b'{"models": {"m": {"overhead_ms": -1, "prefill_ms_per_1k": 5, "key": "k"}}}',
        b'{"models": {"m": {"overhead_ms": 1, "prefill_ms_per_1k": 0, "key": "k"}}}',
        b'{"models": {"m": {"overhead_ms": 1e300, "prefill_ms_per_1k": 1, "key": "k"}}}',
        b'{"models": 5}',
        b"[" * 100_000,
        b" " * (PERF_FILE_MAX_BYTES + 1),
        b"\xff\xfe",
    ],
)
async def test_a_file_that_cannot_be_used_is_logged_in_one_line_and_ignored(bed: Bed, content: bytes, caplog):
    bed.path.write_bytes(content)
    speeds, perf = await bed.node()
    assert speeds.perf("m", 0.0) is None
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert record.message.startswith("perf.unusable") and "\n" not in record.message
    bed.measure(speeds)
    await perf.save()
    written = json.loads(bed.path.read_bytes())["models"]["m"]
    assert written["prefill_ms_per_1k"] == pytest.approx(3000, rel=0.01)


async def test_it_is_written_when_a_rounded_value_changes_and_else_every_ten_minutes(bed: Bed):
    speeds, perf = await bed.node()
    bed.measure(speeds)
    await perf.save()
    first = bed.path.read_bytes()
    speeds.restore("m", Baseline(200.0, 3001.0))
    bed.wall_s += 599
    await perf.save()
    assert bed.path.read_bytes() == first
    bed.wall_s += 1
    await perf.save()
    assert json.loads(bed.path.read_bytes())["models"]["m"]["prefill_ms_per_1k"] == 3001.0
    speeds.restore("m", Baseline(200.0, 3500.0))
    await perf.save()
    assert json.loads(bed.path.read_bytes())["models"]["m"]["prefill_ms_per_1k"] == 3500.0
    speeds.restore("m", Baseline(200.0, 3501.0))
    await perf.save(now=True)
    assert json.loads(bed.path.read_bytes())["models"]["m"]["prefill_ms_per_1k"] == 3501.0


async def test_a_folder_that_takes_no_file_costs_a_line_of_the_log(bed: Bed, caplog):
    speeds, perf = await bed.node()
    bed.measure(speeds)
    bed.path.with_name(bed.path.name + ".new").mkdir()
    await perf.save()
    assert [r.message.split()[0] for r in caplog.records] == ["perf.unsaved"]
