from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from viiwork.cli import demo_story
from viiwork.cli.main import main


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_the_demo_takes_its_nodes_along_however_it_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
):
    running = set()

    async def story(nodes: tuple[demo_story.DemoNode, ...], console: object) -> None:
        assert len(running) == 2
        signal.raise_signal(number)
        await asyncio.Event().wait()

    async def stop(nodes: tuple[demo_story.DemoNode, ...]) -> None:
        running.difference_update(node.name for node in nodes)

    monkeypatch.setattr(demo_story, "check_addresses", lambda nodes: None)
    monkeypatch.setattr(demo_story, "start", lambda node: running.add(node.name))
    monkeypatch.setattr(demo_story, "_story", story)
    monkeypatch.setattr(demo_story, "stop", stop)
    before = signal.getsignal(number)
    if number == signal.SIGHUP:
        signal.signal(number, lambda *_: None)  # its default would end the tests, not fail one
    try:
        assert main(["demo", "--model", str(tmp_path / "m.gguf")]) == 130
    finally:
        signal.signal(number, before)
    assert running == set()


def test_a_file_for_the_numbers_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", "--json", str(tmp_path / "no" / "numbers.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
