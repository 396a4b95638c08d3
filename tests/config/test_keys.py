"""Every key is read by its own type: nothing that YAML gives a meaning of its own changes silently."""

from __future__ import annotations

import pytest

from viiwork.config.convert import V1_SECTIONS


@pytest.mark.parametrize(
    "text",
    [
        "010",
        "0808",
        "1_000",
        "12:30:00",
        "8086:8086",
        "1e3",
        "0x1F96",
        "8086.0",
        "+8086",
        "on",
        "[8086]",
        "{a: b}",
        '"8086"',
        "'8086'",
        "",
        "~",
        "null",
        "9" * 5000,
        ".inf",
        "|\n    8086",
    ],
)
def test_a_port_is_plain_digits_or_refused(refusal, text: str):
    line = refusal(f"api:\n  port: {text}\n")
    assert line.startswith("f.yaml:2: api.port: expected a whole number in plain digits, got ")
    assert len(line) < 200


@pytest.mark.parametrize("text", ["70000", "-1", "0", "65536", "9" * 18])
def test_a_port_out_of_range_says_the_range(refusal, text: str):
    expected = f"f.yaml:2: api.port: expected a whole number from 1 to 65535, got {text}"
    assert refusal(f"api:\n  port: {text}\n") == expected


@pytest.mark.parametrize(
    "text", ['"true"', "'true'", "yes", "on", "True", "TRUE", "y", "1", "", "null", "[true]"]
)
def test_a_boolean_is_true_or_false_or_refused(refusal, text: str):
    line = refusal(f"mesh:\n  open: {text}\n")
    assert line.startswith("f.yaml:2: mesh.open: expected true or false, got ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", "auto"),
        ("on", "on"),
        ("true", "on"),
        ("yes", "on"),
        ("off", "off"),
        ("false", "off"),
        ("no", "off"),
    ],
)
def test_a_tri_state_key_takes_its_three_words_and_their_synonyms(load, text: str, value: str):
    assert load(f"kv_share: {{encrypt: {text}}}").config.kv_share.encrypt == value


@pytest.mark.parametrize("text", ["y", "On", "TRUE", "1", "maybe", "", "[on]"])
def test_another_word_is_no_tri_state(refusal, text: str):
    assert "kv_share.encrypt: expected auto, on or off, got" in refusal(f"kv_share:\n  encrypt: {text}\n")


@pytest.mark.parametrize(
    "name",
    [
        "no",
        "on",
        "y",
        "True",
        "1e3",
        "3.10",
        "0x10",
        "010",
        "2026-11-30",
        "12:30:00",
        "1_000",
        ".nan",
        "=",
        "a/b:Q4",
        "ünï",
        "A",
        "../x",
        "/lead",
        "a%2Fb",
        "x" * 300,
    ],
)
def test_a_model_is_called_what_is_written(load, model_file, name: str):
    assert load(model_file(name=name)).config.models[0].name == name


def test_a_quoted_null_is_a_name_and_a_plain_one_is_refused(load, refusal, model_file):
    assert load(model_file(name='"null"')).config.models[0].name == "null"
    for word in ("null", "Null", "~", ""):
        assert "models[0].name: expected text, got" in refusal(model_file(name=word))


def test_args_and_environment_keep_their_text(load, model_file):
    model = load(model_file(args="[-ngl, 010, on, 1e3, '']", env="{A: yes, B: 0x10, C: '~'}")).config.models[
        0
    ]
    assert model.args == ("-ngl", "010", "on", "1e3", "")
    assert model.env == {"A": "yes", "B": "0x10", "C": "~"}


def test_direct_links_are_a_word_or_a_list(load, refusal):
    assert load("kv_share: {direct: no}").config.kv_share.direct == "off"
    assert load("kv_share: {direct: [10.9.0.0/24, fd00::5]}").config.kv_share.direct == (
        "10.9.0.0/24",
        "fd00::5",
    )
    for text, got in (("10.9.0.0/24", "10.9.0.0/24"), ("{a: b}", "a mapping"), ("~", "~ (leave it out)")):
        line = refusal(f"kv_share:\n  direct: {text}\n")
        assert line == f"f.yaml:2: kv_share.direct: expected auto, on or off or a list, got {got}"
    assert "kv_share.direct[0]: expected text, got a list" in refusal("kv_share: {direct: [[x]]}")


def test_an_environment_is_a_mapping_or_nothing(load, refusal, model_file):
    assert load(model_file(env="")).config.models[0].env == {}
    assert "models[0].env: expected a mapping, got a list" in refusal(model_file(env="[A=b]"))
    assert "models[0].env: expected a mapping, got A=b" in refusal(model_file(env="A=b"))


def test_nothing_inside_a_list_or_an_environment_is_refused(refusal, model_file):
    assert "models[0].args[1]: expected text, got ~" in refusal(model_file(args="[a, ~]"))
    assert "models[0].env.A: expected text, got nothing" in refusal(model_file(env="{A: }"))


def test_an_empty_section_or_list_is_its_default(load):
    config = load("node:\nrouting: ~\nkv_share:\nmodels:\nmesh:\n  open: true\n  seeds:\n  tailnet:\n").config
    assert (config.models, config.mesh.seeds) == ((), ())
    assert config.routing.queue_max == 64


def test_an_optional_value_can_be_null(load, model_file):
    model = load(model_file("llamacpp: {cache_ram_mib: null}", startup_timeout="null")).config.models[0]
    assert model.startup_timeout is None
    assert model.llamacpp.cache_ram_mib is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node: x\n", "f.yaml:1: node: expected a mapping, got x"),
        ("node: [x]\n", "f.yaml:1: node: expected a mapping, got a list"),
        ("models: {name: m}\n", "f.yaml:1: models: expected a list, got a mapping"),
        ("models: m\n", "f.yaml:1: models: expected a list, got m"),
        ("models:\n  - m\n", "f.yaml:2: models[0]: expected a mapping, got m"),
        ("models:\n  -\n", "f.yaml:2: models[0]: expected a mapping, got nothing (leave it out)"),
        ("node:\n  name: [x]\n", "f.yaml:2: node.name: expected text, got a list"),
        ("mesh:\n  seeds: 10.0.0.1:7946\n", "f.yaml:2: mesh.seeds: expected a list, got 10.0.0.1:7946"),
        ("mesh:\n  network: wan\n", "f.yaml:2: mesh.network: expected tailnet or lan, got wan"),
        (
            "routing:\n  queue_timeout: 20\n",
            "f.yaml:2: routing.queue_timeout: expected a duration such as 250ms, 60s or 1m30s, "
            "got 20 (the unit is missing)",
        ),
        (
            "kv_share:\n  memory: 8GB\n",
            "f.yaml:2: kv_share.memory: expected a size such as 512MiB or 8GiB, got 8GB (write GiB)",
        ),
    ],
)
def test_a_wrong_type_is_refused_with_line_and_key(refusal, text: str, said: str):
    assert refusal(text) == said


def test_an_unknown_key_names_the_close_one_or_all(refusal, model_file):
    assert refusal("mesh:\n  sedes: []\n") == (
        "f.yaml:2: mesh.sedes: expected a known key, got sedes (did you mean seeds?)"
    )
    assert refusal("kv-share: {}\n").endswith("got kv-share (did you mean kv_share?)")
    assert refusal("on: {}\n").endswith(
        "(known: node, api, mesh, routing, gpu, health, activity, kv_share, models)"
    )
    assert "models[0].vllm: expected a known key" in refusal(model_file("vllm: {}"))
    assert "models[0].llamacpp.thread: expected a known key" in refusal(model_file("llamacpp: {thread: 1}"))


@pytest.mark.parametrize("key", ["name", "engine", "path", "context"])
def test_a_model_without_a_required_key_is_refused_at_the_model(refusal, key: str):
    keys = {"name": "m", "engine": "llamacpp", "path": "/m.gguf", "context": "1"}
    del keys[key]
    entries = ", ".join(f"{k}: {v}" for k, v in keys.items())
    line = refusal(f"models:\n  - {{{entries}}}\n")
    assert line.startswith(f"f.yaml:2: models[0].{key}: expected ")
    assert line.endswith((" (required), got nothing", " (required), got 0 or nothing"))


@pytest.mark.parametrize("section", V1_SECTIONS)
def test_a_1x_file_is_called_that(refusal, section: str):
    line = refusal(f"node: {{}}\n{section}: {{host: x}}\n")
    assert line.startswith(f"f.yaml:2: {section}: expected a config of this version, got a viiwork 1.x file")


def test_a_1x_file_is_recognised_before_its_other_keys(refusal):
    line = refusal("zzz: 1\npeers: []\nmodel: x\nmesh: {open: maybe}\n")
    assert line.startswith("f.yaml:3: model: expected a config of this version")
