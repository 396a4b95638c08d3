from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from viiwork.config.model import KvShareSection, RoutingSection
from viiwork.core.capacity import KvIdentity
from viiwork.core.replicas import Replica, ReplicaTable
from viiwork.core.sessions import Binding
from viiwork.core.slots import SlotRef
from viiwork.errors import KvRefused, RequestError, Unauthorized
from viiwork.node.dispatch import Dispatcher
from viiwork.node.kv_receive import Receiver
from viiwork.node.kv_stats import KvStats
from viiwork.wire.kvoffer import StateOffer, encode_offer

OFFER = StateOffer(
    session="a" * 32, model="m", generation=100, n_tokens=2000, model_fp="b" * 64, state="4:abc"
)
IDENTITY = KvIdentity("b" * 64, "4:abc", "f16", "f16", False, 4096)


@dataclass
class Layouts:
    """One model with a portable engine, as far as admission looks at it."""

    known: KvIdentity | None = IDENTITY

    def any_of(self, model: str) -> Any:
        return self if self.known is not None and model == "m" else None

    def identity(self) -> KvIdentity:
        assert self.known is not None
        return self.known


class Origins:
    def sent_by(self, method: str, path_qs: str, headers: Any, body: bytes, remote_ip: str) -> str:
        if headers.get("X-Viiwork-Node") != "b":
            raise Unauthorized("not a request of this mesh")
        return "b"


async def nothing(*args: Any) -> None:
    return None


def receiver(
    config: KvShareSection | None = None, layouts: Layouts | None = None, secrets: tuple[bytes, ...] = ()
) -> Receiver:
    dispatcher = Dispatcher("a", RoutingSection(), prepare=nothing, on_end=lambda *args: None)
    made: Any = Receiver(
        "a",
        config or KvShareSection(),
        secrets,
        Origins(),  # type: ignore[arg-type]
        dispatcher,
        ReplicaTable(8),
        layouts or Layouts(),  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        KvStats(),
    )
    return made


def check(made: Receiver, offer: StateOffer = OFFER, ip: str = "127.0.0.2", node: str = "b") -> Any:
    return made.check("POST", "/v1/kv/channel", {"X-Viiwork-Node": node}, encode_offer(offer), ip)


def test_a_fitting_state_of_a_member_is_admitted():
    assert check(receiver()).peer == "b"


def test_a_stranger_is_turned_away_before_its_offer_is_read():
    with pytest.raises(Unauthorized):
        receiver().check("POST", "/v1/kv/channel", {}, b"not even JSON", "127.0.0.2")


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        ({"model": "n"}, "no portable backend"),
        ({"model_fp": "c" * 64}, "weights or state layout"),
        ({"state": "5:abc"}, "weights or state layout"),
        ({"state": "4:other-cache-type"}, "weights or state layout"),
        ({"n_tokens": 4096}, "do not fit"),
        ({"generation": (1 << 63) - 1}, "future"),
    ],
)
def test_a_state_no_engine_here_could_restore_is_refused(offer: dict[str, Any], why: str):
    with pytest.raises(KvRefused, match=why):
        check(receiver(), msgspec.structs.replace(OFFER, **offer))


def test_a_model_that_is_not_portable_here_is_refused():
    with pytest.raises(KvRefused, match="no portable backend"):
        check(receiver(layouts=Layouts(None)))


def test_with_kv_share_off_nothing_is_taken():
    with pytest.raises(KvRefused, match="off"):
        check(receiver(KvShareSection(enabled=False)))


def test_an_open_mesh_takes_states_over_a_lan_only_where_the_operator_said_so():
    with pytest.raises(KvRefused, match=r"kv_share\.open"):
        check(receiver(), ip="192.168.1.7")
    assert check(receiver(KvShareSection(open=True)), ip="192.168.1.7").peer == "b"
    assert check(receiver(secrets=(b"s" * 32,)), ip="192.168.1.7").peer == "b"


def test_an_older_state_than_the_one_held_is_refused():
    made = receiver()
    made._replicas.put(Replica("r", ("a" * 32, "m"), 10, 10, 100, "b"))
    with pytest.raises(KvRefused, match="newer"):
        check(made)
    other = receiver()
    other._dispatcher.sessions.ran_here(("a" * 32, "m"), Binding("a", SlotRef("m/0", 0), 10, 101))
    with pytest.raises(KvRefused, match="newer"):
        check(other)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"session": "../../etc"}', b"\xff", b"{" * 5000])
def test_an_offer_that_is_none_is_a_plain_400(body: bytes):
    with pytest.raises(RequestError) as caught:
        receiver().check("POST", "/v1/kv/channel", {"X-Viiwork-Node": "b"}, body, "127.0.0.2")
    assert caught.value.http_status == 400
