"""Parking: a model of this node takes no requests and holds no memory until it is wanted again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from viiwork.engine.supervisor import Supervisor
from viiwork.errors import RequestError


class Parking:
    """Implements `api.ports.Parking`."""

    def __init__(self, node: str, supervisor: Supervisor) -> None:
        self._node = node
        self._supervisor = supervisor

    def park(self, names: Sequence[str] | None, parked: bool) -> dict[str, Any]:
        """See `api.ports.Parking.park`."""
        known = [model.name for model in self._supervisor.models]
        unknown = [name for name in names or () if name not in known]
        if unknown:
            raise RequestError(
                f"no model {unknown[0][:200]!r} is configured on {self._node}; nothing changed"
            )
        wanted = known if names is None else list(dict.fromkeys(names))
        changed = self._supervisor.park(wanted, parked)
        return {
            "node": self._node,
            "models": [{"name": name, "parked": parked, "changed": name in changed} for name in wanted],
        }
