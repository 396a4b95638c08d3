"""Which of two secrets a node sends with while the mesh goes over from one to the other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

_ID_CHARS = 16
_IDS_MAX = 2


def key_id(key: bytes) -> str:
    """Names a secret without telling anything of it."""
    return sha256(b"viiwork key id\0" + key).hexdigest()[:_ID_CHARS]


def read_ids(text: str) -> frozenset[str]:
    """The ids in a member's metadata; who says nothing of them is taken to know none."""
    return frozenset(word for word in text.split(",", _IDS_MAX)[:_IDS_MAX] if len(word) == _ID_CHARS)


def sending_key(keys: Sequence[bytes], others: Iterable[frozenset[str]]) -> bytes:
    """The secret to encrypt and sign with: the current one once every member can read it, else the previous.

    A node that is restarted with the new secret would otherwise be unreadable for those whose turn comes
    later, and they would lose it although it can read them.
    """
    current, previous = keys[0], keys[-1]
    wanted = key_id(current)
    return current if all(wanted in ids for ids in others) else previous
