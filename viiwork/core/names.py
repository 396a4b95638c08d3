"""Names of nodes: what may be one, because it travels in headers, URLs and file names."""

from __future__ import annotations

import re

from viiwork.limits import NODE_NAME_MAX_BYTES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]*", re.ASCII)
_RESERVED = frozenset({"mesh"})  # `?host=mesh` means "any node"


def node_name_problem(name: str) -> str | None:
    """Why `name` cannot be a node's name, None if it can."""
    if not name:
        return "is empty"
    if len(name.encode("utf-8", "surrogatepass")) > NODE_NAME_MAX_BYTES:
        return f"is longer than {NODE_NAME_MAX_BYTES} bytes"
    if not _NAME.fullmatch(name):
        return "may hold only the letters a-z, digits and . _ : - and starts with a letter or digit"
    if name.lower() in _RESERVED:
        return f"is {name!r}, which stands for the whole mesh"
    return None
