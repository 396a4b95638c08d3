from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.errors import KvError
from viiwork.limits import KV_MESSAGE_MAX_BYTES
from viiwork.wire.replica import (
    Manifest,
    Offer,
    line_of,
    n_chunks,
    pack_offer,
    replica_name,
    root_of,
    seal,
    unpack_offer,
    unseal,
)
from viiwork.wire.whole_file import Plane, StateShape


def shape(n_layer: int = 2, **changes: Any) -> StateShape:
    values: dict[str, Any] = {
        "state_version": 4,
        "kind": "dense",
        "ext": False,
        "v_trans": False,
        "n_rot_k": 0,
        "n_rot_v": 0,
        "k": (Plane(1, 64),) * n_layer,
        "v": (Plane(1, 64),) * n_layer,
    }
    return StateShape(**{**values, **changes})


def offer(**changes: Any) -> Offer:
    values: dict[str, Any] = {
        "session": b"s" * 32,
        "model_fp": b"m" * 32,
        "shape": shape(),
        "n_tokens": 10,
        "tokens_digest": b"t" * 32,
        "total_bytes": 10 * 256 + 400,
        "chunk_bytes": 1 << 20,
        "generation": 7,
        "source": "a",
        "created_unix_s": 1.5,
    }
    return Offer(**{**values, **changes})


def test_an_offer_survives_the_wire() -> None:
    assert unpack_offer(pack_offer(offer())) == offer()


def test_the_largest_allowed_shape_fits_a_message() -> None:
    big = offer(shape=shape(1024), total_bytes=10 * 1024 * 128 + 400)
    assert len(pack_offer(big)) < KV_MESSAGE_MAX_BYTES
    assert unpack_offer(pack_offer(big)) == big


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"session": b"short"},
        {"model_fp": b""},
        {"tokens_digest": b"t" * 31},
        {"n_tokens": 0},
        {"n_tokens": 1 << 40},
        {"total_bytes": 0},
        {"total_bytes": 10 * 256 - 1},
        {"total_bytes": 1 << 30},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 30},
        {"generation": -1},
        {"generation": 1 << 63},
        {"source": ""},
        {"source": "x" * 256},
        {"created_unix_s": float("nan")},
        {"shape": shape(kind="hybrid")},
        {"shape": shape(ext=True)},
        {"shape": shape(k=())},
        {"shape": shape(v=(Plane(1, 64),))},
        {"shape": shape(k=(Plane(12, 64),) * 2)},
        {"shape": shape(k=(Plane(1, -64),) * 2)},
        {"shape": shape(1025)},
    ],
    ids=str,
)
def test_an_offer_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(KvError) as caught:
        unpack_offer(pack_offer(offer(**change)))
    assert caught.value.reason == "bad_offer"


def test_an_offer_with_an_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(pack_offer(offer()))
    with pytest.raises(KvError):
        unpack_offer(msgspec.msgpack.encode({**fields, "path": "/etc/passwd"}))


def test_an_oversized_offer_is_not_decoded() -> None:
    with pytest.raises(KvError, match="too large"):
        unpack_offer(bytes(KV_MESSAGE_MAX_BYTES + 1))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_an_offer_or_an_error(data: bytes) -> None:
    with pytest.raises(KvError):
        unpack_offer(data)


def test_a_manifest_with_one_bit_changed_is_refused() -> None:
    sealed = seal(Manifest(offer=offer(), root=b"r" * 32))
    assert unseal(sealed) == Manifest(offer=offer(), root=b"r" * 32)
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
    assert line_of(offer()) == line_of(offer(generation=8, source="b"))
    assert line_of(offer()) != line_of(offer(session=b"t" * 32))
    assert line_of(offer()) != line_of(offer(model_fp=b"n" * 32))


def test_the_root_of_a_content_does_not_move() -> None:
    # Two nodes of different versions compare roots: this value may change only with the protocol version.
    assert root_of(bytes(64)).hex() == "4d006976636a8696d909a630a4081aad4d7c50f81afdee04020bf05086ab6a55"


@pytest.mark.parametrize(("total", "count"), [(1, 1), (1 << 20, 1), ((1 << 20) + 1, 2)])
def test_the_last_chunk_may_be_short(total: int, count: int) -> None:
    assert n_chunks(offer(total_bytes=total)) == count
