"""Whatever the bytes of the file are: a config, or one line that says where and why not."""

from __future__ import annotations

from importlib.resources import files

from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.config.load import LoadedConfig, parse_config
from viiwork.config.render import effective_yaml
from viiwork.errors import ConfigError

EXAMPLE = files("viiwork.config").joinpath("example.yaml").read_bytes()
ODD = st.sampled_from(
    [
        b"null",
        b"~",
        b"[",
        b"]",
        b"{",
        b"}",
        b"&a ",
        b"*a",
        b"!!x ",
        b"|",
        b">",
        b"? ",
        b"- ",
        b": ",
        b"#",
        b'"',
        b"'",
        b"\n",
        b"\r",
        b"\t",
        b"\x00",
        b"\x85",
        b"\xff",
        b"\xe2\x80\xa8",
        b"\xef\xbb\xbf",
        b"---\n",
        b"...\n",
        b"%YAML 1.1\n",
        b"<<",
        b"true",
        b"010",
        b"1e9",
        b"9" * 50,
        b"-1",
        b"9h",
        b"models",
        b"mesh",
        b"\\",
        b"\\ud800",
        b"\xf0\x9f\x8c\x8d",
    ]
)
ENV = {"VIIWORK_MESH_SECRET": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}


def config_or_line(data: bytes) -> None:
    try:
        loaded = parse_config(data, "f.yaml", ENV)
    except ConfigError as error:
        line = str(error)
        assert line.isprintable()
        assert len(line) < 600
        number = line.removeprefix("f.yaml:").partition(":")[0]
        assert 1 <= int(number) <= len(data) + 1
        assert ENV["VIIWORK_MESH_SECRET"] not in line
    else:
        assert isinstance(loaded, LoadedConfig)
        assert all(w.isprintable() for w in loaded.warnings)
        assert parse_config(effective_yaml(loaded.config).encode(), "f.yaml", ENV).config == loaded.config


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.lists(ODD, max_size=30).map(b"".join))
def test_random_bytes(data: bytes):
    config_or_line(data)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=100))
def test_random_text(text: str):
    config_or_line(text.encode(errors="surrogatepass"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(EXAMPLE)), st.integers(0, 12), ODD | st.binary(max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_the_example_with_odd_bytes_in_it(edits: list[tuple[int, int, bytes]]):
    data = EXAMPLE
    for at, n_dropped, put in edits:
        data = data[:at] + put + data[at + n_dropped :]
    config_or_line(data)


VALUES = st.recursive(
    st.sampled_from(
        [
            "null",
            "on",
            "010",
            "1e3",
            "x",
            "''",
            '"8086"',
            "12:30:00",
            "[]",
            "{}",
            "1",
            "-1",
            "9" * 30,
            "/x",
            "1s",
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(["name", "open", "a"]), inner, max_size=2).map(
            lambda d: f"{{{', '.join(f'{k}: {v}' for k, v in d.items())}}}"
        )
    ),
    max_leaves=6,
)
LINES = [
    n for n, line in enumerate(EXAMPLE.splitlines()) if b": " in line and not line.lstrip().startswith(b"#")
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(LINES), VALUES)
def test_the_example_with_another_value_at_one_key(n: int, value: str):
    lines = EXAMPLE.splitlines()
    lines[n] = lines[n].partition(b": ")[0] + b": " + value.encode()
    config_or_line(b"\n".join(lines))
