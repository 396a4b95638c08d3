from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viiwork.errors import RequestError
from viiwork.wire.probe import Answer, Probe, decode_answer, decode_probe, decode_table, is_proof, prove

RUN, OTHER_RUN, KEY = "1" * 32, "2" * 32, b"k" * 32
PROBE = Probe(to="b", addr="10.9.0.2", nonce="3" * 32)


def answer(key: bytes = KEY, **changes: str) -> Answer:
    said = {"asks": "a", "asked": "b", "addr": "10.9.0.2", "nonce": "3" * 32, "run": RUN} | changes
    return Answer(node="b", proof=prove(key, **said))


def test_the_node_that_was_asked_proves_itself_with_either_secret():
    assert is_proof(answer(), (b"new" * 8, KEY), asks="a", probe=PROBE, run=RUN)


@pytest.mark.parametrize(
    "changes",
    [{"asks": "c"}, {"asked": "c"}, {"addr": "10.9.0.3"}, {"nonce": "4" * 32}, {"run": OTHER_RUN}],
)
def test_a_proof_for_anything_else_is_none(changes):
    assert not is_proof(answer(**changes), (KEY,), asks="a", probe=PROBE, run=RUN)


def test_without_the_secret_there_is_no_proof():
    assert not is_proof(answer(b"x" * 32), (KEY,), asks="a", probe=PROBE, run=RUN)


def test_in_an_open_mesh_the_run_is_the_key():
    assert is_proof(answer(bytes.fromhex(RUN)), (), asks="a", probe=PROBE, run=RUN)
    assert not is_proof(answer(bytes.fromhex(OTHER_RUN)), (), asks="a", probe=PROBE, run=RUN)


@pytest.mark.parametrize("addr", ["10.9.0.02", "fe80::1%eth0", "FE80::1", "localhost", "10.9.0.0/24"])
def test_an_address_in_another_spelling_is_refused(addr):
    body = f'{{"node":"b","run":"{RUN}","addresses":[{{"addr":"{addr}"}}]}}'
    with pytest.raises(RequestError, match="not a table of addresses"):
        decode_table(body.encode())


@given(st.binary(max_size=200))
def test_no_bytes_make_a_reader_fail_in_another_way(data: bytes):
    for read in (decode_table, decode_probe, decode_answer):
        with pytest.raises(RequestError):
            read(data)
