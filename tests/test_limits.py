from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from viiwork import limits
from viiwork.core.capacity import CapacityReport, ModelCapacity
from viiwork.wire.capacity import decode_report, encode_report

PACKAGE = Path(limits.__file__).parent


def defined() -> list[str]:
    tree = ast.parse(Path(limits.__file__).read_text())
    return [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)]


def test_every_limit_is_defined_once():
    assert [name for name, n in Counter(defined()).items() if n > 1] == []


def test_every_limit_bounds_something():
    used = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "limits.py")
    words = set(re.findall(r"\w+", used))
    assert [name for name in defined() if name not in words] == []


def test_the_longest_name_a_config_may_give_a_model_passes_through_a_capacity_report():
    name = "m" * limits.MODEL_NAME_MAX_BYTES
    report = CapacityReport("a", "1", (ModelCapacity(name, slots=1, backends=1, healthy_backends=1),))
    assert decode_report(encode_report(report)).models[0].name == name
