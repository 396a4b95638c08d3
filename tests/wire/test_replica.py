from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.errors import KvError
from viiwork.limits import KV_FRAME_MAX_BYTES, KV_MESSAGE_MAX_BYTES, KV_PREFIX_TOKENS
from viiwork.wire.delta import keep_of, pieces_of, starts_of
from viiwork.wire.groups import rows_of_group
from viiwork.wire.replica import (
    BlobFacts,
    CacheManifest,
    Have,
    Manifest,
    Mark,
    Offer,
    common_prefix,
    line_of,
    longest_common,
    pack_message,
    prefix_digests,
    replica_name,
    seal,
    unpack_begin,
    unpack_commit,
    unpack_have,
    unpack_offer,
    unseal,
)
from viiwork.wire.state import CacheShape, Plane, RecurrentShape, StateShape


def cache(n_layer: int = 2, **changes: Any) -> CacheShape:
    planes = (Plane(1, 64),) * n_layer
    values: dict[str, Any] = {"name": "base", "n_rot_k": 0, "n_rot_v": 0, "k": planes, "v": planes}
    return CacheShape(**{**values, **changes})


def shape(*caches: CacheShape, **changes: Any) -> StateShape:
    values: dict[str, Any] = {"state_version": 4, "ext": False, "caches": caches or (cache(),)}
    return StateShape(**{**values, **changes})


SWA = shape(cache(), cache(name="swa"))
RECURRENT = RecurrentShape(n_layer=2, rows=(Plane(0, 64),) * 2)


def offer(**changes: Any) -> Offer:
    values: dict[str, Any] = {
        "session": b"s" * 32,
        "model_fp": b"m" * 32,
        "shape": shape(),
        "n_tokens": 10,
        "tokens_digest": b"t" * 32,
        "prefix": b"",
        "needed": (0,),
        "generation": 7,
        "source": "a",
        "created_unix_s": 1.5,
    }
    return Offer(**{**values, **changes})


def test_an_offer_survives_the_wire() -> None:
    assert unpack_offer(pack_message(offer())) == offer()


def test_the_largest_allowed_shape_fits_a_message() -> None:
    most = 4 * 1024 * 1024
    big = offer(
        shape=shape(cache(1024), cache(1024, name="swa")),
        n_tokens=most,
        prefix=bytes(16 * most // KV_PREFIX_TOKENS),
        needed=(0, most - 1),
    )
    big = msgspec.structs.replace(big, n_tokens=256, prefix=bytes(16), needed=(0, 0))
    assert len(pack_message(big)) < KV_MESSAGE_MAX_BYTES
    assert unpack_offer(pack_message(big)) == big


BLOB = BlobFacts(kind="recurrent", n_tokens=10, size=100)


@pytest.mark.parametrize(
    "change",
    [
        {"session": b"short"},
        {"model_fp": b""},
        {"tokens_digest": b"t" * 31},
        {"n_tokens": 0},
        {"n_tokens": 1 << 40},
        {"prefix": bytes(16)},
        {"needed": ()},
        {"needed": (1,)},
        {"needed": (-1,)},
        {"needed": (0, 10), "shape": SWA},
        {"generation": -1},
        {"generation": 1 << 63},
        {"source": ""},
        {"source": "x" * 256},
        {"created_unix_s": float("nan")},
        {"known": (Mark(generation=1, source="a", keep=1),) * 17},
        {"blobs": (BLOB,)},
        {"shape": shape(recurrent=RECURRENT)},
        {"shape": shape(recurrent=RECURRENT), "blobs": (BLOB, BLOB)},
        {"shape": shape(recurrent=RECURRENT), "blobs": (msgspec.structs.replace(BLOB, size=1 << 40),)},
        {"shape": shape(recurrent=RECURRENT), "blobs": (msgspec.structs.replace(BLOB, n_tokens=9),)},
        {"shape": shape(cache(name="swa"))},
        {"shape": shape(cache(), cache())},
        {"shape": shape(cache(k=()))},
        {"shape": shape(cache(v=(Plane(1, 64),)))},
        {"shape": shape(cache(k=(Plane(12, 64),) * 2))},
        {"shape": shape(cache(k=(Plane(1, -64),) * 2))},
        {"shape": shape(cache(k=(Plane(1, 63),) * 2))},
        {"shape": shape(cache(k=(Plane(1, KV_FRAME_MAX_BYTES),) * 2))},
        {"shape": shape(cache(1025))},
    ],
    ids=str,
)
def test_an_offer_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(KvError) as caught:
        unpack_offer(pack_message(offer(**change)))
    assert caught.value.reason == "bad_offer"


def test_an_offer_of_another_version_is_refused_as_that() -> None:
    with pytest.raises(KvError) as caught:
        unpack_offer(pack_message(offer(version=3)))
    assert caught.value.reason == "version"


def test_an_offer_with_an_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(pack_message(offer()))
    with pytest.raises(KvError):
        unpack_offer(msgspec.msgpack.encode({**fields, "path": "/etc/passwd"}))


def test_an_oversized_offer_is_not_decoded() -> None:
    with pytest.raises(KvError, match="too large"):
        unpack_offer(bytes(KV_MESSAGE_MAX_BYTES + 1))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for decode in (
        unpack_offer,
        lambda data: unpack_have(data, offer()),
        unpack_begin,
        unpack_commit,
        unseal,
    ):
        with pytest.raises(KvError):
            decode(data)


_small = st.integers(-2, 40)


@settings(max_examples=200, deadline=None)
@given(
    n=_small,
    lineage=st.booleans(),
    lows=st.lists(_small, max_size=3).map(tuple),
    common=_small,
    tail=st.binary(max_size=80),
    digests=st.binary(max_size=64),
)
def test_whatever_a_peer_says_it_holds_keeps_no_more_than_agrees(**said: Any) -> None:
    state = offer(shape=SWA, needed=(0, 3))
    tokens = bytes(40)
    try:
        have = unpack_have(pack_message(Have(**said)), state)
    except KvError as error:
        assert error.reason == "protocol"
        return
    keep = keep_of(state, tokens, have, 0)
    assert 0 <= keep <= min(have.n, state.n_tokens)
    starts = starts_of(state, keep, have.lows)
    pieces = list(pieces_of(state, have, keep, tuple(start for start, _ in starts)))
    assert all(0 < piece.size <= KV_FRAME_MAX_BYTES for piece in pieces)


def tokens(*ids: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in ids)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1500), st.integers(0, 1500), st.integers(0, 1500))
def test_two_token_lists_agree_up_to_where_they_part(same: int, left: int, right: int) -> None:
    front = tokens(*range(same))
    a, b = front + tokens(*[70_000] * left), front + tokens(*[80_000] * right)
    assert longest_common(a, b) == same
    common = common_prefix(prefix_digests(a), b)
    assert common == same // KV_PREFIX_TOKENS * KV_PREFIX_TOKENS


@pytest.mark.parametrize(
    ("bytes_a_position", "rows"), [(64, 256), (8192, 256), (8193, 128), (1 << 20, 2), (3 << 20, 1)]
)
def test_a_group_is_a_power_of_two_of_positions_and_at_most_2_mib(bytes_a_position: int, rows: int) -> None:
    assert rows_of_group(cache(1, k=(Plane(1, bytes_a_position),), v=())) == rows


def manifest(**changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "session": b"s" * 32,
        "model_fp": b"m" * 32,
        "shape": shape(),
        "generation": 7,
        "source": "a",
        "created_unix_s": 1.5,
        "tokens": tokens(1, 2, 3),
        "caches": (CacheManifest(lo=0, needed=0, digests=bytes(16)),),
    }
    return Manifest(**{**values, **changes})


def test_a_manifest_with_one_bit_changed_is_refused() -> None:
    sealed = seal(manifest())
    assert unseal(sealed) == manifest()
    for at in range(0, len(sealed), 7):
        broken = bytearray(sealed)
        broken[at] ^= 1
        with pytest.raises(KvError) as caught:
            unseal(bytes(broken))
        assert caught.value.reason == "bad_manifest"
    with pytest.raises(KvError):
        unseal(sealed[:-1])
    with pytest.raises(KvError):
        unseal(b"")


def test_names_tell_generations_apart_and_lines_join_them() -> None:
    assert replica_name(offer()) != replica_name(offer(generation=8))
    assert replica_name(offer()) == replica_name(manifest())
    assert line_of(offer()) == line_of(offer(generation=8, source="b")) == line_of(manifest())
    assert line_of(offer()) != line_of(offer(session=b"t" * 32))
    assert line_of(offer()) != line_of(offer(model_fp=b"n" * 32))
