"""Rules between keys and ranges, each with the line of the key that breaks it."""

from __future__ import annotations

import pytest

from viiwork.config.load import parse_config
from viiwork.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node:\n  name: a b\n", "2: node.name: expected a name without whitespace, got a b"),
        (
            'node:\n  name: "a\\u200bb"\n',
            "2: node.name: expected a name of visible characters, got a\\u200bb",
        ),
        (f"node:\n  name: {'x' * 256}\n", "2: node.name: expected at most 64 bytes, got 256"),
        (
            "node:\n  name: gpu/1\n",
            "2: node.name: expected a name other nodes accept, got gpu/1, which may",
        ),
        ("node:\n  name: Mesh\n", "2: node.name: expected a name other nodes accept, got Mesh, which is"),
        ('node:\n  state_dir: ""\n', "2: node.state_dir: expected an absolute path, got an empty text"),
        ("node:\n  state_dir: ~/viiwork\n", "(~ is not expanded)"),
        ("node:\n  state_dir: state\n", "2: node.state_dir: expected an absolute path, got state"),
        ("api:\n  host: localhost\n", "2: api.host: expected an IP address, got localhost (host names"),
        ("api:\n  host: '[::]'\n", "(write it without brackets)"),
        ("api:\n  host: 010.0.0.1\n", "2: api.host: expected an IP address, got 010.0.0.1"),
        ("api:\n  port: 7946\n", "4: mesh.bind_port: expected a port other than api.port, got 7946"),
        (
            "routing:\n  queue_max: -1\n",
            "2: routing.queue_max: expected a whole number from 0 to 1000000, got -1",
        ),
        ("routing:\n  stale_after: 1s\n", "expected longer than mesh.capacity_poll (1s), got 1s"),
        ("health:\n  interval: 0\n", "2: health.interval: expected at least 10ms, got 0"),
        ("health:\n  max_failures: 0\n", "2: health.max_failures: expected a whole number from 1 to"),
        ("activity:\n  event_history: -5\n", "2: activity.event_history: expected a whole number from 0 to"),
        ("kv_share:\n  memory: 0\n", "2: kv_share.memory: expected more than 0"),
        ("kv_share:\n  replicas: 0\n", "2: kv_share.replicas: expected a whole number from 1 to 16, got 0"),
        (
            "kv_share:\n  stall_share: 0\n",
            "2: kv_share.stall_share: expected a share of the time from 0.001 to 1.0, got 0.0",
        ),
        (
            "kv_share:\n  stall_share: 1.5\n",
            "2: kv_share.stall_share: expected a share of the time from 0.001",
        ),
        ("kv_share:\n  min_tokens: 0\n", "2: kv_share.min_tokens: expected a whole number from 1 to"),
        ("kv_share:\n  dir: kv\n", "2: kv_share.dir: expected an absolute path, got kv"),
        (
            "kv_share:\n  direct: [10.9.0.1/24]\n",
            "2: kv_share.direct[0]: expected 10.9.0.0/24 or one address, got 10.9.0.1/24",
        ),
        (
            "kv_share:\n  plain: [cable]\n",
            "2: kv_share.plain[0]: expected an address or a range such as 10.9",
        ),
    ],
)
def test_a_value_out_of_its_rule_is_refused(refusal, text: str, said: str):
    line = refusal(text)
    assert line.startswith("f.yaml:")
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bind_port: 0", "mesh.bind_port: expected a whole number from 1 to 65535, got 0"),
        ("advertise: node-a", "mesh.advertise: expected an IP address, got node-a (host names"),
        ("advertise: 0.0.0.0", "mesh.advertise: expected an address other machines can reach, got 0.0.0.0"),
        ("advertise: 169.254.1.1", "mesh.advertise: expected an address other machines can reach"),
        (
            "advertise: '::ffff:10.0.0.1'",
            "mesh.advertise: expected 10.0.0.1 for an IPv4 address, got ::ffff:",
        ),
        ("advertise: 224.0.0.1", "mesh.advertise: expected an address other machines can reach"),
        (
            "advertise: fe80::1%eth0",
            "mesh.advertise: expected an IP address, got fe80::1%eth0 (an address with",
        ),
        ("secret_env: 'my secret'", "mesh.secret_env: expected the name of an environment variable"),
        ("secret_prev_env: VIIWORK_MESH_SECRET", "mesh.secret_prev_env: expected a variable other than"),
        ("capacity_poll: 0", "mesh.capacity_poll: expected at least 10ms, got 0"),
        ("rejoin_interval: 9ms", "mesh.rejoin_interval: expected at least 10ms, got 9ms"),
        ("tailnet: {socket: ''}", "mesh.tailnet.socket: expected an absolute path, got an empty text"),
        (f"seeds: [{','.join(['10.0.0.1:1'] * 257)}]", "mesh.seeds: expected at most 256 addresses, got 257"),
    ],
)
def test_a_mesh_key_out_of_its_rule_is_refused(refusal, text: str, said: str):
    assert refusal(f"mesh:\n  open: true\n  {text}\n").startswith(f"f.yaml:3: {said}")


@pytest.mark.parametrize(
    "seed", ["10.0.0.1:7946", "[fd00::5]:7946", "[::1]:1", "127.0.0.1:65535", "8.8.8.8:53"]
)
def test_a_seed_is_an_address_and_a_port(load, seed: str):
    assert load(f"mesh: {{open: true, seeds: ['{seed}']}}").config.mesh.seeds == (seed,)


@pytest.mark.parametrize(
    "seed",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:",
        ":7946",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:07946",
        "10.0.0.1:x",
        "10.0.0.1:-1",
        "node-a:7946",
        "localhost:7946",
        "::1:7946",
        "[::1]",
        "[10.0.0.1]:7946",
        "[fe80::1%eth0]:7946",
        "[fe80::1]:7946",
        "[::ffff:10.0.0.1]:7946",
        "0.0.0.0:7946",
        "224.0.0.1:7946",
        "http://10.0.0.1:7946",
        "10.0.0.1:7946/",
        "10.1:7946",
        "10.0.0.1:١",
        "10.0.0.1: 7946",
    ],
)
def test_what_is_not_is_refused_with_its_place_in_the_list(refusal, seed: str):
    line = refusal(f"mesh:\n  open: true\n  seeds:\n    - 10.0.0.1:7946\n    - '{seed}'\n")
    assert line.startswith("f.yaml:5: mesh.seeds[1]: expected ")


@pytest.mark.parametrize(
    ("keys", "more", "said"),
    [
        ({"name": "''"}, (), "models[0].name: expected a name, got an empty text"),
        ({"name": "a b"}, (), "models[0].name: expected a name without whitespace, got a b"),
        ({"name": "x" * 513}, (), "models[0].name: expected at most 512 bytes, got 513"),
        ({"engine": "vllm"}, (), "models[0].engine: expected llamacpp or external, got vllm"),
        ({"path": "m.gguf"}, (), "models[0].path: expected an absolute path, got m.gguf"),
        (
            {"context": "0"},
            (),
            "models[0].context: expected a whole number from 1 to 2147483647 (required), got 0",
        ),
        (
            {"context": "2147483647", "parallel": "2"},
            (),
            "models[0].context: expected a whole number from 1 to 1073",
        ),
        ({"parallel": "0"}, (), "models[0].parallel: expected a whole number from 1 to 256, got 0"),
        ({"startup_timeout": "0"}, (), "models[0].startup_timeout: expected a duration longer than 0, got 0"),
        ({"gpus": "[0, 1, 0]"}, (), "models[0].gpus[2]: expected each card once, got 0 again"),
        ({"gpus": "[-1]"}, (), "models[0].gpus[0]: expected a whole number from 0 to 1023, got -1"),
        (
            {"gpus": "[0, 1, 2]", "gpus_per_backend": "2"},
            (),
            "models[0].gpus_per_backend: expected a divisor of the 3",
        ),
        (
            {"gpus_per_backend": "2"},
            (),
            "models[0].gpus_per_backend: expected 1, since models[0].gpus is empty",
        ),
        ({"gpus_per_backend": "0"}, (), "models[0].gpus_per_backend: expected a whole number from 1 to"),
        ({"env": "{A=B: c}"}, (), "models[0].env: expected names of environment variables, got A=B"),
        ({"env": '{A: "a\\0b"}'}, (), "models[0].env.A: expected text without NUL"),
        ({"args": '["a\\0b"]'}, (), "models[0].args[0]: expected text without NUL, got a\\x00b"),
        ({}, ("llamacpp: {binary: bin/llama}",), "models[0].llamacpp.binary: expected an absolute path"),
        (
            {},
            ("llamacpp: {binary: ' llama-server'}",),
            "models[0].llamacpp.binary: expected a path, a name or",
        ),
        (
            {},
            ("llamacpp: {split_mode: tensor}",),
            "models[0].llamacpp.split_mode: expected layer or row, got tensor",
        ),
        (
            {},
            ("llamacpp: {split_weights: [1, 1]}",),
            "models[0].llamacpp.split_weights: expected one weight for each",
        ),
        (
            {},
            ("llamacpp: {main_gpu: 1}",),
            "models[0].llamacpp.main_gpu: expected a whole number from 0 to 0, got 1",
        ),
        (
            {},
            ("llamacpp: {threads: -1}",),
            "models[0].llamacpp.threads: expected a whole number from 0 to 1024",
        ),
        (
            {},
            ("llamacpp: {cache_ram_mib: -2}",),
            "models[0].llamacpp.cache_ram_mib: expected a whole number from -1",
        ),
        ({}, ("llamacpp: {cache_type_k: q8}",), "models[0].llamacpp.cache_type_k: expected one of f32, f16"),
        (
            {},
            ("llamacpp: {cache_type_v: q8_0, flash_attn: off}",),
            "models[0].llamacpp.cache_type_v: expected f32, f16, bf16 while flash_attn is off",
        ),
    ],
)
def test_a_model_out_of_its_rules_is_refused(refusal, model_file, keys, more, said: str):
    assert f": {said}" in refusal(model_file(*more, **keys))


def test_split_weights_are_one_positive_number_a_card(load, refusal, model_file):
    cards = {"gpus": "[0, 1, 2, 3]", "gpus_per_backend": "2"}
    llamacpp = (
        load(model_file("llamacpp: {split_weights: [3.10, 1], main_gpu: 1}", **cards))
        .config.models[0]
        .llamacpp
    )
    assert llamacpp.split_weights == (3.1, 1.0)
    assert "split_weights[1]: expected more than 0, got 0.0" in refusal(
        model_file("llamacpp: {split_weights: [1, 0]}", **cards)
    )
    assert "split_weights[0]: expected a decimal number, got 1e3" in refusal(
        model_file("llamacpp: {split_weights: [1e3, 1]}", **cards)
    )


def two_models(first: str, second: str) -> str:
    rest = "engine: llamacpp, path: /m.gguf, context: 512"
    return f"models:\n  - {{{first}, {rest}}}\n  - {{{second}, {rest}}}\n"


def test_two_models_do_not_share_a_name(load, refusal):
    expected = "f.yaml:3: models[1].name: expected a name of its own, got a as models[0] has"
    assert refusal(two_models("name: a", "name: 'a'")) == expected
    assert len(load(two_models("name: a", "name: A")).config.models) == 2


def test_two_models_share_a_card_only_on_apple(load, refusal):
    text = two_models("name: a, gpus: [0]", "name: b, gpus: [0]")
    expected = "f.yaml:3: models[1].gpus[0]: expected a card of no other model, got 0, which models[0] has"
    assert refusal(text) == expected
    assert len(load(text + "gpu: {vendor: apple}\n").config.models) == 2


def test_a_wildcard_host_is_legal_and_warned_about(load):
    assert "api.host 0.0.0.0 listens on every network" in load("node: {}").warnings[0]
    assert "api.host :: listens on every network" in load("api: {host: '::'}").warnings[0]
    assert load("api: {host: 192.168.1.5}").warnings == ()


def test_a_loopback_advertise_is_legal_and_said_to_be_local(load):
    loaded = load("api: {host: 127.0.0.2}\nmesh: {open: true, advertise: 127.0.0.2}\n")
    assert loaded.config.mesh.advertise == "127.0.0.2"
    assert loaded.warnings == ("mesh.advertise 127.0.0.2 is loopback: only nodes on this machine can join",)


@pytest.mark.parametrize(
    ("host", "advertise", "said"),
    [
        ("127.0.0.1", "", "api.host 127.0.0.1 is loopback: peers cannot reach this node"),
        ("10.0.0.1", "10.0.0.2", "api.host 10.0.0.1 is not listening on mesh.advertise 10.0.0.2"),
        ("0.0.0.0", "fd00::5", "api.host 0.0.0.0 is not listening on mesh.advertise fd00::5"),
        (
            "8.8.4.4",
            "8.8.4.4",
            "mesh.advertise 8.8.4.4 is outside the private ranges: an open mesh refuses it",
        ),
    ],
)
def test_a_node_its_peers_cannot_reach_is_warned_about(load, host: str, advertise: str, said: str):
    loaded = load(f"api: {{host: '{host}'}}\nmesh: {{open: true, advertise: '{advertise}'}}\n")
    assert any(w.startswith(said) for w in loaded.warnings)


def test_an_open_lan_mesh_is_warned_about(load):
    assert any(w.startswith("mesh.open: everyone") for w in load("mesh: {network: lan, open: true}").warnings)


def test_arguments_that_take_the_nodes_decisions_are_warned_about(load, model_file):
    warnings = load(
        model_file(args="[--port=1, -np, '4', --threads, '2']", gpus="[0]") + "gpu: {vendor: none}"
    ).warnings
    assert "models[0].args override what the node decides: --port, -np" in warnings
    assert "models[0].gpus are listed but gpu.vendor is none: the cards are not used" in warnings


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("'*'", "every web page"),
        ("'*.ts.net'", "your own tailnet"),
        ("chat example", "an origin such as"),
        ("''", "empty"),
    ],
)
def test_origins_that_would_let_everybody_in_or_mean_nothing_are_refused(entry, said):
    with pytest.raises(ConfigError, match=said) as raised:
        parse_config(
            f"mesh: {{open: true}}\napi: {{cors: {{allow_origins: [ok.example, {entry}]}}}}".encode(), "f", {}
        )
    assert "f:2: api.cors.allow_origins[1]" in str(raised.value)


def test_origins_are_counted():
    names = ", ".join(f"h{i}.example" for i in range(257))
    with pytest.raises(ConfigError, match="at most 256 origins"):
        parse_config(f"mesh: {{open: true}}\napi: {{cors: {{allow_origins: [{names}]}}}}".encode(), "f", {})
