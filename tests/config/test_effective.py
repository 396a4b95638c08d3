"""The printed config holds everything in effect and loads again as the same config."""

from __future__ import annotations

import msgspec
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from viiwork.config.load import parse_config
from viiwork.config.model import (
    Bytes,
    Config,
    KvShareSection,
    LlamacppSection,
    MeshSection,
    ModelSection,
    NodeSection,
    RoutingSection,
    Seconds,
    Tri,
)
from viiwork.config.model_rules import CACHE_TYPES
from viiwork.config.render import effective_yaml
from viiwork.core.names import node_name_problem

TRI = st.sampled_from([Tri("auto"), Tri("on"), Tri("off")])
COUNTS = st.integers(1, 1_000_000)
DURATIONS = st.integers(10_000, 30 * 86_400 * 1_000_000).map(lambda us: Seconds(us / 1_000_000))
# Words that YAML would read as something else, and anything a person can type.
WORDS = st.sampled_from(
    ["no", "null", "~", "1e3", "3.10", "010", "0x10", "2026-11-30", "a: b", "#x", "-", "*a", "&a"]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | WORDS
NAMES = TEXT.filter(lambda s: s and s.isprintable() and not any(c.isspace() for c in s))
NODE_NAMES = (NAMES | st.text("aZ09._:-", max_size=64)).filter(lambda s: node_name_problem(s) is None)
PATHS = TEXT.map(lambda s: "/" + "".join(filter(str.isprintable, s)))
SEEDS = st.ip_addresses(v=4, network="10.0.0.0/8").map("{}:7946".format) | st.ip_addresses(
    v=6, network="fd00::/8"
).map("[{}]:7946".format)

LLAMACPP = st.builds(
    LlamacppSection,
    binary=st.sampled_from(["", "embedded", "llama-server", "/opt/llama server/bin"]),
    split_weights=st.lists(st.integers(1, 10**6).map(lambda n: n / 1000), min_size=2, max_size=2).map(tuple),
    main_gpu=st.integers(0, 1),
    threads=st.integers(0, 64),
    cache_ram_mib=st.none() | st.integers(-1, 1 << 20),
    cache_type_k=st.sampled_from(CACHE_TYPES),
    flash_attn=TRI,
)
MODELS = st.builds(
    ModelSection,
    name=NAMES,
    engine=st.just("llamacpp"),
    path=PATHS,
    context=st.integers(1, 1_000_000),
    gpus=st.just(()),
    gpus_per_backend=st.just(2),
    parallel=st.integers(1, 256),
    startup_timeout=st.none() | DURATIONS,
    args=st.lists(TEXT, max_size=4).map(tuple),
    env=st.dictionaries(st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,10}", fullmatch=True), TEXT, max_size=3),
    llamacpp=LLAMACPP,
)


def with_own_cards(models: list[ModelSection]) -> tuple[ModelSection, ...]:
    return tuple(msgspec.structs.replace(m, gpus=(2 * i, 2 * i + 1)) for i, m in enumerate(models))


CONFIGS = st.builds(
    Config,
    node=st.builds(NodeSection, name=NODE_NAMES | st.just(""), state_dir=PATHS),
    mesh=st.builds(
        MeshSection,
        network=st.sampled_from(["tailnet", "lan"]),
        advertise=st.sampled_from(["", "127.0.0.2", "10.1.2.3", "fd00::5"]),
        open=st.just(True),
        seeds=st.lists(SEEDS, max_size=3).map(tuple),
        capacity_poll=st.just(Seconds(0.25)),
        rejoin_interval=DURATIONS,
    ),
    routing=st.builds(RoutingSection, queue_max=COUNTS, queue_timeout=DURATIONS, performance=st.booleans()),
    kv_share=st.builds(
        KvShareSection,
        enabled=st.booleans(),
        dir=PATHS | st.just(""),
        memory=st.integers(1, 1 << 50).map(Bytes),
        min_tokens=COUNTS,
        stall_share=st.floats(0.001, 1.0).map(lambda share: round(share, 4)),
        direct=TRI | st.lists(st.ip_addresses(v=4).map(str), max_size=3).map(tuple),
        encrypt=TRI,
    ),
    models=st.lists(MODELS, max_size=3, unique_by=lambda m: m.name).map(with_own_cards),
)


@settings(max_examples=80, deadline=None)
@given(CONFIGS)
def test_a_printed_config_loads_as_the_same_config(config: Config):
    printed = effective_yaml(config)
    assert parse_config(printed.encode(), "f.yaml", {}).config == config


@settings(max_examples=25, deadline=None)
@given(CONFIGS)
def test_another_yaml_reader_sees_the_same_texts(config: Config):
    read = yaml.safe_load(effective_yaml(config))
    assert [m["name"] for m in read["models"] or []] == [m.name for m in config.models]
    assert [m["env"] for m in read["models"] or []] == [m.env for m in config.models]
    assert read["node"]["name"] == config.node.name


def test_every_key_is_printed_with_its_default():
    read = yaml.safe_load(effective_yaml(Config()))
    assert read["mesh"]["tailnet"] == {"enabled": "auto", "socket": "/var/run/tailscale/tailscaled.sock"}
    assert read["kv_share"]["memory"] == "8GiB"
    assert read["models"] == []
