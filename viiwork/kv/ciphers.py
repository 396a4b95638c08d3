"""Which cipher this machine is quick at: with AES instructions it is AES-GCM, without ChaCha20 by far."""

from __future__ import annotations

import time

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from viiwork.limits import KV_CIPHER_TEST_BYTES, KV_CIPHER_TEST_ROUNDS


def prefers_aes() -> bool:
    """Measured by the thread's CPU time, so that a busy machine answers alike; takes about 10 ms of it."""
    return _cost_of(AESGCM(bytes(32))) < _cost_of(ChaCha20Poly1305(bytes(32)))


def _cost_of(cipher: AESGCM | ChaCha20Poly1305) -> int:
    """Nanoseconds of the quickest round."""
    data = bytearray(KV_CIPHER_TEST_BYTES)
    out = bytearray(len(data) + 16)
    costs = []
    for _ in range(KV_CIPHER_TEST_ROUNDS):
        begun = time.thread_time_ns()
        cipher.encrypt_into(bytes(12), data, None, out)
        costs.append(time.thread_time_ns() - begun)
    return min(costs)
