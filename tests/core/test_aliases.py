from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.core.aliases import (
    Entry,
    Write,
    believable,
    conflicts,
    entry_of,
    is_live,
    live,
    merged,
    purged,
    resolve,
    with_removed,
    with_reverted,
    with_set,
)
from viiwork.errors import AliasConflict, UnknownAlias
from viiwork.limits import (
    ALIAS_CLOCK_SKEW_MS,
    ALIAS_NAMES_MAX,
    ALIAS_SETTINGS_MAX,
    ALIAS_TOMBSTONE_KEPT_MS,
    ALIAS_VER_MAX,
    ALIASES_MAX,
)

NOW = 1_800_000_000_000
MODELS = ("qwen", "gemma", "llama")


def put(table, name, target, *fallbacks, by="a", now_ms=NOW, force=False, known=MODELS):
    return with_set(
        table, name, target, fallbacks, known=lambda m: m in known, force=force, now_ms=now_ms, by=by
    )


# Few values, so that equal versions, equal times, equal settings and overflowing histories all come up.
writes = st.builds(
    Write,
    st.integers(1, 30),
    st.integers(0, 3),
    st.sampled_from("ab"),
    st.sampled_from(["", *(f"m{i}" for i in range(14))]),
    st.just(()),
)
entries = st.lists(writes, min_size=1, max_size=30).map(entry_of)
tables = st.dictionaries(st.sampled_from("xyz"), entries)


class TestMerge:
    @given(tables, tables)
    def test_it_does_not_matter_who_hears_of_whom(self, a, b):
        assert merged(a, b) == merged(b, a)

    @given(tables, tables, tables)
    @settings(max_examples=400)
    def test_it_does_not_matter_in_which_order_tables_meet(self, a, b, c):
        assert merged(merged(a, b), c) == merged(a, merged(b, c))

    @given(tables, tables)
    def test_hearing_a_thing_again_changes_nothing(self, a, b):
        both = merged(a, b)
        assert merged(both, b) is both and merged(both, a) is both and merged(a, a) is a

    @given(st.lists(writes, min_size=1, max_size=40), st.randoms(use_true_random=False))
    def test_single_writes_in_any_order_make_the_same_alias(self, many, random):
        def told(order: list[Write]) -> Mapping[str, Entry]:
            return reduce(merged, ({"x": entry_of([w])} for w in order), {})

        shuffled = [*many, *many[:5]]
        random.shuffle(shuffled)
        assert told(many) == told(shuffled) == {"x": entry_of(many)}

    @given(entries)
    def test_what_counts_is_the_newest_and_the_history_is_bounded_without_repeats(self, entry):
        assert list(entry.writes) == sorted(entry.writes, reverse=True)
        kept = [(w.target, w.fallbacks) for w in entry.writes]
        assert len(set(kept)) == len(kept) <= ALIAS_SETTINGS_MAX + entry.deleted
        assert not any(w.deleted for w in entry.history)

    def test_of_two_writes_the_higher_version_counts_then_the_later_then_the_larger_name(self):
        low, late, large = Write(2, 9, "z", "m1"), Write(3, 5, "a", "m2"), Write(3, 5, "b", "m3")
        assert entry_of([large, low, late]).writes == (large, late, low)

    def test_the_loser_of_a_conflict_becomes_the_first_of_the_history_unless_it_was_a_removal(self):
        base = put({}, "x", "qwen")
        ours, theirs = put(base, "x", "gemma", by="a"), put(base, "x", "llama", by="b")
        both = merged(ours, theirs)["x"]
        assert [w.target for w in both.writes] == ["llama", "gemma", "qwen"]
        removed = with_removed(base, "x", now_ms=NOW, by="a")
        assert [w.target for w in merged(removed, theirs)["x"].writes] == ["llama", "qwen"]

    def test_a_write_that_comes_without_history_keeps_what_is_known(self):
        base = put({}, "x", "qwen")
        news = {"x": Entry(put(base, "x", "gemma")["x"].current)}
        assert [w.target for w in merged(base, news)["x"].writes] == ["gemma", "qwen"]


class TestConflicts:
    def test_writes_unaware_of_each_other_are_told_once(self):
        base = put({}, "x", "qwen")
        ours, theirs = put(base, "x", "gemma", by="a"), put(base, "x", "llama", by="b")
        [(name, winner, loser)] = conflicts(ours, theirs)
        assert (name, winner.target, loser.target) == ("x", "llama", "gemma")
        assert not list(conflicts(merged(ours, theirs), theirs))
        assert not list(conflicts(merged(theirs, ours), ours))

    def test_a_later_version_is_no_conflict(self):
        base = put({}, "x", "qwen")
        assert not list(conflicts(base, put(base, "x", "gemma", by="b")))
        assert not list(conflicts(base, base)) and not list(conflicts({}, base))


class TestBelievable:
    def test_a_write_from_the_far_future_is_left_out_and_the_rest_of_its_alias_taken(self):
        late = Write(7, NOW + ALIAS_CLOCK_SKEW_MS + 1, "evil", "m9")
        honest = put({}, "x", "qwen")
        theirs = {"x": entry_of([late, *honest["x"].writes]), "y": Entry(late)}
        assert believable(theirs, {}, NOW) == honest

    def test_a_member_cannot_freeze_an_alias_at_the_highest_version(self):
        claim = Write(ALIAS_VER_MAX, NOW + ALIAS_CLOCK_SKEW_MS, "evil", "m9")
        table = merged(put({}, "x", "qwen"), believable({"x": Entry(claim)}, {}, NOW))
        assert table["x"].current == claim
        ours = put(table, "x", "gemma")
        assert merged(table, ours)["x"].current.target == "gemma"
        assert ours["x"].current.ver == ALIAS_VER_MAX
        # A moment later the other nodes, whose clocks say the same, believe it too.
        assert believable(ours, table, NOW + 1) == ours

    def test_removals_nobody_keeps_any_more_are_not_brought_back(self):
        table = with_removed(put({}, "x", "qwen"), "x", now_ms=NOW, by="a")
        assert believable(table, {}, NOW + ALIAS_TOMBSTONE_KEPT_MS) == table
        assert believable(table, {}, NOW + ALIAS_TOMBSTONE_KEPT_MS + 1) == {}

    def test_new_names_beyond_the_tables_room_are_left_out_but_known_ones_still_change(self):
        full = {f"n{i}": Entry(Write(1, NOW, "a", "m")) for i in range(ALIAS_NAMES_MAX)}
        theirs = {"new": Entry(Write(1, NOW, "b", "m")), "n0": Entry(Write(2, NOW, "b", "m2"))}
        assert set(believable(theirs, full, NOW)) == {"n0"}
        assert len(believable({**full, "new": theirs["new"]}, {}, NOW)) == ALIAS_NAMES_MAX


class TestPurge:
    def test_removals_are_kept_thirty_days_and_aliases_for_ever(self):
        table = with_removed(put(put({}, "x", "qwen"), "y", "qwen"), "x", now_ms=NOW, by="a")
        assert purged(table, NOW + ALIAS_TOMBSTONE_KEPT_MS) is table
        assert set(purged(table, NOW + ALIAS_TOMBSTONE_KEPT_MS + 1)) == {"y"}


class TestWriting:
    def test_each_write_is_one_version_later(self):
        table = put(put({}, "x", "qwen"), "x", "gemma", "llama", by="b", now_ms=NOW + 5)
        assert table["x"].current == Write(2, NOW + 5, "b", "gemma", ("llama",))
        assert table["x"].history == (Write(1, NOW, "a", "qwen"),)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "x" * 65, "x\n", "a:b"])
    def test_a_bad_name_is_refused(self, name):
        with pytest.raises(AliasConflict, match="an alias name has 1 to 64"):
            put({}, name, "qwen")

    @pytest.mark.parametrize(
        ("write", "why"),
        [
            (lambda t: put(t, "qwen", "gemma"), "'qwen' is a model of the mesh"),
            (lambda t: put(t, "y", ""), "needs a target"),
            (lambda t: put(t, "y", "x"), "the target 'x' is itself an alias"),
            (lambda t: put(t, "y", "y", force=True), "the target 'y' is itself an alias"),
            (lambda t: put(t, "y", "qwen", "x", force=True), "the fallback 'x' is itself an alias"),
            (lambda t: put(t, "y", "nope"), "no node serves the target 'nope'"),
            (lambda t: put(t, "y", "qwen", "nope"), "no node serves the fallback 'nope'"),
            (lambda t: put(t, "y", "qwen", "gemma", "gemma"), "'gemma' is named twice"),
            (lambda t: put(t, "y", "qwen", "qwen"), "'qwen' is named twice"),
            (lambda t: put(t, "y", "a b", force=True), "characters that are not visible"),
            (lambda t: put(t, "y", "m" * 513, force=True), "longer than 512 bytes"),
            (lambda t: put(t, "y", "qwen", "", force=True), "the name is empty"),
            (lambda t: put(t, "y", "m" * 400, "n" * 400, force=True), "more than 700 bytes together"),
        ],
    )
    def test_what_makes_no_sense_is_refused_and_says_why(self, write, why):
        with pytest.raises(AliasConflict, match=why):
            write(put({}, "x", "qwen"))

    def test_force_allows_models_nobody_serves_yet(self):
        assert put({}, "x", "later", "much-later", force=True)["x"].current.target == "later"

    def test_a_model_whose_name_an_alias_has_too_may_be_a_target(self):
        table = put({}, "later", "qwen", known=("qwen",))
        assert put(table, "y", "later", known=("qwen", "later"))["y"].current.target == "later"

    def test_a_full_table_takes_changes_but_no_new_aliases(self):
        table = {f"n{i}": Entry(Write(1, NOW, "a", "qwen")) for i in range(ALIASES_MAX)}
        with pytest.raises(AliasConflict, match="256 aliases already"):
            put(table, "one-more", "qwen")
        table = with_removed(put(table, "n0", "gemma"), "n1", now_ms=NOW, by="a")
        table = put(table, "one-more", "qwen")
        with pytest.raises(AliasConflict, match="256 aliases already"):
            with_reverted(table, "n1", now_ms=NOW, by="a")

    def test_names_of_removed_aliases_take_room_too(self):
        table = {f"n{i}": Entry(Write(1, NOW, "a")) for i in range(ALIAS_NAMES_MAX)}
        with pytest.raises(AliasConflict, match="1024 names are in use or were removed"):
            put(table, "one-more", "qwen")
        assert is_live(put(table, "n0", "qwen"), "n0")

    def test_removing_leaves_a_mark_that_beats_the_alias(self):
        table = put({}, "x", "qwen")
        removed = with_removed(table, "x", now_ms=NOW, by="a")
        assert not is_live(removed, "x") and list(live(removed)) == []
        assert merged(removed, table) is removed
        for gone in ("x", "y"):
            with pytest.raises(UnknownAlias):
                with_removed(removed, gone, now_ms=NOW, by="a")

    def test_reverting_twice_is_an_undo_of_the_revert(self):
        table = put(put({}, "x", "qwen", "llama"), "x", "gemma")
        once = with_reverted(table, "x", now_ms=NOW, by="b")
        assert (once["x"].current.target, once["x"].current.fallbacks) == ("qwen", ("llama",))
        assert once["x"].current.ver == 3 and [w.target for w in once["x"].history] == ["gemma"]
        twice = with_reverted(once, "x", now_ms=NOW, by="b")
        assert [w.target for w in twice["x"].writes] == ["gemma", "qwen"]

    def test_reverting_a_removal_brings_the_alias_back(self):
        table = with_removed(put({}, "x", "qwen"), "x", now_ms=NOW, by="a")
        assert with_reverted(table, "x", now_ms=NOW, by="a")["x"].current.target == "qwen"

    def test_what_has_no_past_cannot_be_reverted(self):
        with pytest.raises(AliasConflict, match="never set to anything else"):
            with_reverted(put({}, "x", "qwen"), "x", now_ms=NOW, by="a")
        with pytest.raises(UnknownAlias):
            with_reverted({}, "x", now_ms=NOW, by="a")


class TestResolving:
    ENTRY = Entry(Write(1, NOW, "a", "qwen", ("gemma", "llama")))

    @pytest.mark.parametrize(
        ("known", "served", "means"),
        [
            ((), ("qwen", "gemma"), ("qwen", "ok")),
            ((), ("llama", "gemma"), ("gemma", "fallback")),
            ((), ("llama",), ("llama", "fallback")),
            ((), (), (None, "unavailable")),
            (("x",), ("qwen", "x"), (None, "shadowed")),
            (("x",), (), (None, "shadowed")),
        ],
    )
    def test_a_model_of_the_name_then_the_target_then_the_first_served_fallback(self, known, served, means):
        assert resolve(self.ENTRY, "x", known=lambda m: m in known, served=lambda m: m in served) == means
