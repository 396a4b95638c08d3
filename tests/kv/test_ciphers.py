"""Which cipher a worker would rather use."""

from __future__ import annotations

from typing import Any

import pytest

from viiwork.kv import ciphers


class Cipher:
    """Takes its time."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def encrypt_into(self, *_: Any) -> None:
        sum(range(self._rounds))


@pytest.mark.parametrize("quick", ["AESGCM", "ChaCha20Poly1305"])
def test_the_cipher_that_costs_less_is_preferred(quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AESGCM", "ChaCha20Poly1305"):
        rounds = 1 if name == quick else 100_000
        monkeypatch.setattr(ciphers, name, lambda _key, rounds=rounds: Cipher(rounds))
    assert ciphers.prefers_aes() is (quick == "AESGCM")


def test_both_ciphers_can_be_measured() -> None:
    assert ciphers.prefers_aes() in (True, False)
