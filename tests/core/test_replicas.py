from __future__ import annotations

from dataclasses import replace

import pytest

from viiwork.core.addresses import is_private_path
from viiwork.core.capacity import KvIdentity, ModelCapacity
from viiwork.core.replicas import (
    Replica,
    ReplicaTable,
    path_allowed,
    targets,
    warmth,
)

IDENTITY = KvIdentity("fp", "4", "f16", "f16", False, 4096)
KEY = ("s", "m")


def peer(name: str, identity: KvIdentity | None = IDENTITY, model: str = "m") -> tuple[str, ModelCapacity]:
    return name, ModelCapacity(model, slots=1, backends=1, healthy_backends=1, kv=identity)


def replica(generation: int, name: str = "r") -> Replica:
    return Replica(f"{name}{generation}", KEY, 2000, 10, generation, "b")


def test_only_peers_whose_engine_could_restore_the_state_are_targets():
    peers = [
        peer("right"),
        peer("other-weights", replace(IDENTITY, model_fp="x")),
        peer("other-cache-type", replace(IDENTITY, cache_type_k="q8_0")),
        peer("too-small", replace(IDENTITY, n_ctx=2000)),
        peer("not-portable", None),
        peer("other-model", IDENTITY, "n"),
    ]
    assert targets("s", "m", IDENTITY, 2000, peers) == ["right"]


def test_a_larger_context_on_the_other_side_is_no_hindrance():
    assert targets("s", "m", IDENTITY, 2000, [peer("b", replace(IDENTITY, n_ctx=8192))]) == ["b"]


def test_a_model_that_is_not_portable_here_goes_nowhere():
    assert targets("s", "m", None, 2000, [peer("b")]) == []


def test_targets_are_the_first_in_the_sessions_own_order():
    peers = [peer(name) for name in "bcdef"]
    firsts = {targets(str(number), "m", IDENTITY, 2000, peers)[0] for number in range(100)}
    assert firsts == set("bcdef")
    assert targets("s", "m", IDENTITY, 2000, peers) == targets("s", "m", IDENTITY, 2000, peers[::-1])


def test_the_newest_generation_of_a_session_is_kept():
    table = ReplicaTable(8)
    assert table.put(replica(2)) == []
    assert table.put(replica(1)) == [replica(1)]
    assert table.put(replica(3)) == [replica(2)]
    assert table.get(KEY) == replica(3) and len(table) == 1


def test_removing_an_older_name_leaves_the_newer_replica():
    table = ReplicaTable(8)
    table.put(replica(3))
    table.remove("r2")
    assert table.get(KEY) == replica(3)
    table.remove("r3")
    assert table.get(KEY) is None


def test_the_table_drops_the_oldest_session_beyond_its_limit():
    table = ReplicaTable(1)
    table.put(replica(1))
    assert table.put(Replica("x", ("t", "m"), 1, 1, 1, "b")) == [replica(1)]


def test_a_replica_that_made_room_is_remembered_until_there_is_another():
    table = ReplicaTable(8)
    table.put(replica(1))
    table.evicted("r1")
    assert table.get(KEY) is None and table.was_evicted(KEY)
    table.put(replica(2))
    table.remove("r2")
    assert not table.was_evicted(KEY), "it was used up, which is no eviction"


@pytest.mark.parametrize("addr", ["127.0.0.2", "::1", "100.100.1.2", "fd7a:115c:a1e0::5", "::ffff:127.0.0.1"])
def test_loopback_and_tailnet_are_always_allowed(addr):
    assert path_allowed(addr, secured=False, open_lan=False) == ""
    assert is_private_path(addr)


@pytest.mark.parametrize("addr", ["192.168.1.5", "100.128.0.1", "8.8.8.8", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_other_addresses_need_a_secret_or_the_operators_word(addr):
    assert "kv_share.open" in path_allowed(addr, secured=False, open_lan=False)
    assert path_allowed(addr, secured=True, open_lan=False) == ""
    assert path_allowed(addr, secured=False, open_lan=True) == ""
    assert not is_private_path(addr)


def test_warmth_follows_the_share_of_the_prompt_that_was_reused():
    assert warmth(90, 100) == "warm"
    assert warmth(89, 100) == "partly"
    assert warmth(29, 100) == "cold"
    assert warmth(None, 100) == warmth(0, 0) == "cold"
