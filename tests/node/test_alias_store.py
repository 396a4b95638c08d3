"""The alias table on disk: whole or not at all, and never behind what a client was told."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from viiwork.core.aliases import Entry, Write
from viiwork.errors import AliasNotSaved, StateDirError
from viiwork.limits import ALIAS_FILE_MAX_BYTES, ALIAS_TOMBSTONE_KEPT_MS
from viiwork.node import alias_store
from viiwork.node.alias_store import FILE_NAME, AliasStore
from viiwork.wire.aliases import decode_table, digest, encode_table

NOW = 1_800_000_000_000
ONE = {"x": Entry(Write(1, NOW, "a", "qwen"))}
TWO = {**ONE, "y": Entry(Write(1, NOW, "a", "gemma"))}


def on_disk(folder):
    return decode_table((folder / FILE_NAME).read_bytes())


async def test_what_was_changed_is_there_after_a_restart(tmp_path):
    store = AliasStore.open(tmp_path, NOW)
    assert store.table == {} and not (tmp_path / FILE_NAME).exists()
    assert await store.change(lambda table: ONE) is store.table
    assert AliasStore.open(tmp_path, NOW).table == store.table == ONE
    assert store.digest == digest(ONE) and os.listdir(tmp_path) == [FILE_NAME]


async def test_nothing_is_written_when_nothing_changes(tmp_path):
    store = AliasStore.open(tmp_path, NOW)
    await store.change(lambda table: table)
    assert not (tmp_path / FILE_NAME).exists()


def test_expired_removals_are_left_behind_at_the_start(tmp_path):
    gone = {"z": Entry(Write(2, NOW, "a"))}
    (tmp_path / FILE_NAME).write_bytes(encode_table({**ONE, **gone}))
    assert AliasStore.open(tmp_path, NOW + ALIAS_TOMBSTONE_KEPT_MS + 1).table == ONE


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is no alias table"),
        (encode_table(ONE)[:-3], "it is no alias table"),
        (b'{"v":3,"aliases":{}}', "it is of version 3"),
        (b" " * (ALIAS_FILE_MAX_BYTES + 1), "it is larger than"),
        (json.dumps({"v": 1, "aliases": {"\x1b[2J": {}}}).encode(), "it is no alias table"),
    ],
)
def test_a_file_that_cannot_be_used_ends_the_start_with_one_line_that_names_it(tmp_path, data, why):
    (tmp_path / FILE_NAME).write_bytes(data)
    with pytest.raises(StateDirError, match=why) as caught:
        AliasStore.open(tmp_path, NOW)
    text = str(caught.value)
    assert str(tmp_path / FILE_NAME) in text and "move it away" in text and text.isprintable()
    assert (tmp_path / FILE_NAME).read_bytes() == data


def test_a_file_that_cannot_be_read_ends_the_start_too(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StateDirError, match="cannot be read: Is a directory"):
        AliasStore.open(tmp_path, NOW)


@pytest.mark.parametrize("step", ["fsync", "replace"])
async def test_a_full_disk_changes_neither_memory_nor_the_file(tmp_path, monkeypatch, step):
    store = AliasStore.open(tmp_path, NOW)
    await store.change(lambda table: ONE)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if step == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(Path, "replace", fail)
        with pytest.raises(AliasNotSaved, match="nothing was changed: No space left on device"):
            await store.change(lambda table: TWO)
    assert store.table == on_disk(tmp_path) == ONE and store.digest == digest(ONE)
    assert os.listdir(tmp_path) == [FILE_NAME]
    await store.change(lambda table: TWO)
    assert on_disk(tmp_path) == TWO


async def test_what_a_decision_raises_changes_nothing(tmp_path):
    store = AliasStore.open(tmp_path, NOW)

    def decide(table):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await store.change(decide)
    assert store.table == {}


async def test_a_write_whose_client_left_ends_all_the_same_and_others_wait_for_it(tmp_path, monkeypatch):
    store = AliasStore.open(tmp_path, NOW)
    entered, go = threading.Event(), threading.Event()
    really = alias_store.replace_file

    def slow(path, data):
        entered.set()
        assert go.wait(30)
        really(path, data)

    monkeypatch.setattr(alias_store, "replace_file", slow)
    first = asyncio.create_task(store.change(lambda table: ONE))
    await asyncio.to_thread(entered.wait, 30)
    second = asyncio.create_task(store.change(lambda table: {**table, "y": TWO["y"]}))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert first.cancelled() and store.table == {}
    go.set()
    assert await second == TWO == on_disk(tmp_path)
