"""The documented defaults are the real ones, and every key is documented."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from viiwork.config.convert import convert
from viiwork.config.document import Mapping, Node, Sequence, parse_document
from viiwork.config.load import LoadedConfig, parse_config
from viiwork.config.model import Config, LlamacppSection, ModelSection, Section
from viiwork.config.render import value_yaml

ENV = {"VIIWORK_MESH_SECRET": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}
EXAMPLE = files("viiwork.config").joinpath("example.yaml").read_text()
DOCS = (Path(__file__).parents[2] / "docs/configuration.md").read_text()
COMMENTED = re.compile(
    r"^( *)# ((\w+): \S.*)$"
)  # a key without default; prose has no `key: value` at its start


def section_of(kind: Any) -> type[Section] | None:
    """The section behind a key's type, also inside a tuple."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return (
        next((s for arg in get_args(kind) if (s := section_of(arg))), None)
        if get_origin(kind) is tuple
        else None
    )


def keys_of(cls: type[Section], path: str = "") -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every key below `cls` with its path; list entries as `models[]`."""
    for field in msgspec.structs.fields(cls):
        here = f"{path}.{field.encode_name}" if path else field.encode_name
        section = section_of(field.type)
        if section is None:
            yield here, field
        else:
            yield from keys_of(section, here + "[]" if get_origin(field.type) is tuple else here)


KEYS = dict(keys_of(Config))


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return value_yaml(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)


def paths_in(node: Node, path: str = "") -> Iterator[str]:
    if isinstance(node, Mapping) and node.entries:
        for entry in node.entries:
            yield from paths_in(entry.value, f"{path}.{entry.key}" if path else entry.key)
    elif isinstance(node, Sequence) and node.items:
        for item in node.items:
            yield from paths_in(item, path + "[]")
    else:
        yield path


def uncommented(text: str) -> str:
    """The example with the keys that have no default taken in; the head's prose stays out."""
    return "\n".join(
        found[1] + found[2] if (found := COMMENTED.match(line)) and line.startswith(" ") else line
        for line in text.splitlines()
    )


@pytest.fixture
def example() -> LoadedConfig:
    return parse_config(EXAMPLE.encode(), "example.yaml", ENV)


def test_every_default_in_the_example_is_the_codes(example: LoadedConfig):
    assert msgspec.structs.replace(example.config, models=()) == Config()


def test_every_default_of_the_examples_model_is_the_codes(example: LoadedConfig):
    (model,) = example.config.models
    given = {"name", "engine", "path", "context"}
    assert model == ModelSection(**{name: getattr(model, name) for name in given})
    assert model.llamacpp == LlamacppSection()


def test_the_example_has_every_key():
    assert set(paths_in(parse_document(uncommented(EXAMPLE).encode()))) == set(KEYS)


def test_only_keys_without_default_are_commented_out():
    missing = set(KEYS) - set(paths_in(parse_document(EXAMPLE.encode())))
    assert missing == {path for path, field in KEYS.items() if field.default is None}


def test_what_the_example_comments_out_is_valid_too():
    model = convert(parse_document(uncommented(EXAMPLE).encode())).config.models[0]
    assert model.startup_timeout == 600
    assert model.llamacpp.cache_ram_mib == 8192


def documented() -> dict[str, str]:
    """Key path to default, out of the tables of the docs."""
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| (\S[^|]*?) \| \S.* \|$", DOCS, re.MULTILINE)
    return {path: default.strip("`") for path, default in rows}


def test_the_docs_list_every_key_with_its_default_and_no_other():
    assert documented() == {path: default_of(field) for path, field in KEYS.items()}


def test_the_docs_files_and_messages_are_real(tmp_path: Path):
    for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL):
        parse_config(block.encode(), "f.yaml", {})


def test_every_type_of_a_key_is_one_that_is_read_from_text():
    """A new kind of key must be taught to the reader, not fall through to text."""
    known = {"str", "bool", "int", "float", "Tri", "Seconds", "Bytes", "NoneType"}

    def names(kind: Any) -> set[str]:
        if get_origin(kind) is typing.Literal:
            return set()
        if get_origin(kind) in (tuple, dict, types.UnionType, typing.Union):
            return set().union(*(names(arg) for arg in get_args(kind) if arg is not ...))
        return {kind.__name__}

    assert set().union(*(names(field.type) for field in KEYS.values())) <= known
