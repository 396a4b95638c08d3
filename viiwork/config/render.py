"""The effective config as YAML that loads again as the same config."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from viiwork.config.model import Bytes, Config, Seconds, Section
from viiwork.config.scalars import format_decimal, format_duration, format_size

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Words that other YAML readers would not take for text.
_NOT_TEXT = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def effective_yaml(config: Config) -> str:
    """Every key of `config`, defaults included; mesh secrets are not in a config and so not here."""
    lines: list[str] = []
    _section(config, "", lines)
    return "\n".join(lines) + "\n"


def value_yaml(value: Any) -> str:
    """A value on one line, as `effective_yaml` writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Seconds):
        return format_duration(value)
    if isinstance(value, Bytes):
        return format_size(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return format_decimal(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(k)}: {_text(v)}' for k, v in value.items())}}}"
    return _text(value)


def _section(section: Section, indent: str, lines: list[str]) -> None:
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            lines.append(f"{indent}{field.encode_name}:")
            _section(value, indent + "  ", lines)
        elif isinstance(value, tuple) and value and isinstance(value[0], Section):
            lines.append(f"{indent}{field.encode_name}:")
            for item in value:
                first = len(lines)
                _section(item, indent + "    ", lines)
                lines[first] = f"{indent}  - {lines[first].lstrip()}"
        else:
            lines.append(f"{indent}{field.encode_name}: {value_yaml(value)}")


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
