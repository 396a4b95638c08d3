"""What an alias means on a node, what a write answers, and what is taken over from members."""

from __future__ import annotations

import logging

import pytest

from viiwork.core.aliases import Entry, Write
from viiwork.errors import AliasConflict, AliasUnserved, UnknownAlias
from viiwork.limits import ALIAS_CLOCK_SKEW_MS, ALIAS_TOMBSTONE_KEPT_MS
from viiwork.node.alias_store import AliasStore
from viiwork.node.aliases import Aliases

NOW = 1_800_000_000_123


class Mesh:
    """Two sets of names and a clock."""

    def __init__(self, tmp_path):
        self.known, self.served = {"qwen", "gemma"}, {"qwen", "gemma"}
        self.now_ms = NOW
        self.told: list[str] = []
        self.aliases = Aliases(
            "a",
            AliasStore.open(tmp_path, NOW),
            known=lambda m: m in self.known,
            served=lambda m: m in self.served,
            on_write=lambda name, entry: self.told.append(f"{name} {entry.current.ver}"),
            now_ms=lambda: self.now_ms,
        )


@pytest.fixture
def mesh(tmp_path):
    return Mesh(tmp_path)


async def test_a_name_that_is_no_alias_is_left_alone(mesh):
    assert mesh.aliases.model_for("qwen") is None and mesh.aliases.model_for("x") is None
    await mesh.aliases.put("x", "qwen", [], False)
    await mesh.aliases.delete("x")
    assert mesh.aliases.model_for("x") is None and mesh.aliases.listing() == []


async def test_target_fallback_and_nobody(mesh):
    await mesh.aliases.put("x", "qwen", ["gemma"], False)
    assert mesh.aliases.model_for("x") == "qwen"
    mesh.served = {"gemma"}
    assert mesh.aliases.model_for("x") == "gemma"
    mesh.served = set()
    with pytest.raises(AliasUnserved, match="the alias 'x' stands for 'qwen' or 'gemma'") as caught:
        mesh.aliases.model_for("x")
    assert caught.value.http_status == 503 and caught.value.retry_after_s == 5
    mesh.known.add("x")
    assert mesh.aliases.model_for("x") is None  # the model of that name, served or not


async def test_the_listing_says_what_each_alias_stands_for_now(mesh):
    await mesh.aliases.put("x", "qwen", ["gemma"], False)
    await mesh.aliases.put("later", "m9", [], True)
    mesh.served = {"gemma"}
    common = {"updated_at": "2027-01-15T08:00:00.123Z", "updated_by": "a"}
    assert mesh.aliases.listing() == [
        {
            "name": "later",
            "target": "m9",
            "fallbacks": [],
            "resolved": None,
            "state": "unavailable",
            **common,
        },
        {
            "name": "x",
            "target": "qwen",
            "fallbacks": ["gemma"],
            "resolved": "gemma",
            "state": "fallback",
            **common,
        },
    ]
    mesh.known.add("x")
    assert [(a["resolved"], a["state"]) for a in mesh.aliases.listing()][1] == (None, "shadowed")


async def test_a_time_beyond_the_calendar_is_shown_as_its_end(mesh):
    await mesh.aliases.put("x", "qwen", [], False)
    mesh.now_ms = 1 << 53
    await mesh.aliases.merge([{"x": Entry(Write(9, 1 << 53, "b", "gemma"))}])
    assert mesh.aliases.listing()[0]["updated_at"] == "9999-12-31T23:59:59.999Z"


async def test_a_write_answers_what_members_hear(mesh):
    answer = await mesh.aliases.put("x", "qwen", ["gemma"], False)
    entry = {"target": "qwen", "fallbacks": ["gemma"], "ver": 1, "ts": NOW, "by": "a", "deleted": False}
    assert answer == {"name": "x", "entry": entry}
    await mesh.aliases.put("x", "gemma", [], False)
    assert (await mesh.aliases.revert("x"))["entry"]["target"] == "qwen"
    assert (await mesh.aliases.delete("x"))["entry"]["deleted"] is True
    assert (await mesh.aliases.revert("x"))["entry"]["ver"] == 5
    assert mesh.told == ["x 1", "x 2", "x 3", "x 4", "x 5"]
    for refused, error in (
        (mesh.aliases.delete("y"), UnknownAlias),
        (mesh.aliases.revert("y"), UnknownAlias),
    ):
        with pytest.raises(error):
            await refused
    with pytest.raises(AliasConflict):
        await mesh.aliases.put("qwen", "gemma", [], True)
    assert len(mesh.told) == 5


async def test_members_writes_are_taken_over_and_not_told_again(mesh, caplog):
    caplog.set_level(logging.INFO)
    before = mesh.aliases.digest
    await mesh.aliases.merge(
        [{"x": Entry(Write(1, NOW, "b", "qwen"))}, {"y": Entry(Write(1, NOW, "b", "qwen"))}]
    )
    assert mesh.aliases.model_for("x") == mesh.aliases.model_for("y") == "qwen"
    assert mesh.aliases.digest != before and mesh.told == []
    assert "alias.heard name=x target=qwen ver=1 by=b" in caplog.text


async def test_what_cannot_be_believed_is_left_out_and_the_rest_taken(mesh):
    late = Entry(Write(2, NOW + ALIAS_CLOCK_SKEW_MS + 1, "b", "gemma"))
    old = Entry(Write(2, NOW - ALIAS_TOMBSTONE_KEPT_MS - 1, "b"))
    await mesh.aliases.merge([{"late": late, "old": old, "x": Entry(Write(1, NOW, "b", "qwen"))}])
    assert set(mesh.aliases.table) == {"x"}


async def test_a_conflict_is_logged_once_and_the_loser_can_be_reverted_to(mesh, caplog):
    await mesh.aliases.put("x", "qwen", [], False)
    theirs = {"x": Entry(Write(1, NOW + 1, "b", "gemma"))}
    for _ in range(3):
        await mesh.aliases.merge([theirs])
    conflicts = [r.getMessage() for r in caplog.records if "alias.conflict" in r.getMessage()]
    assert conflicts == ["alias.conflict name=x ver=1 by=b lost=a target=gemma"]
    assert mesh.aliases.model_for("x") == "gemma"
    assert (await mesh.aliases.revert("x"))["entry"]["target"] == "qwen"


async def test_removals_are_forgotten_after_their_time(mesh):
    await mesh.aliases.put("x", "qwen", [], False)
    await mesh.aliases.delete("x")
    await mesh.aliases.purge()
    assert "x" in mesh.aliases.table
    mesh.now_ms += ALIAS_TOMBSTONE_KEPT_MS + 1
    await mesh.aliases.purge()
    assert mesh.aliases.table == {}
