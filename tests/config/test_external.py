from __future__ import annotations

import pytest

from viiwork.config.render import effective_yaml

ENTRY = "models:\n  - {{name: m, engine: external, {}}}\n"


def test_a_server_needs_its_address_and_nothing_else(load):
    loaded = load(ENTRY.format("url: http://box:8000"))
    (model,) = loaded.config.models
    assert (model.url, model.context, model.parallel, model.path) == ("http://box:8000", 0, 1, "")
    assert loaded.api_keys == {} and loaded.file == "f.yaml"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("parallel: 2", "url: expected the server's address, as http://host:port (required), got nothing"),
        ("url: box:8000", "url: expected an address as http://host:port or https://host:port, got box:8000"),
        ("url: ftp://box", "models[0].url: expected an address as"),
        ("url: 'http://'", "models[0].url: expected an address as"),
        ("url: 'http://box:0'", "models[0].url: expected an address as"),
        ("url: 'http://box:99999'", "models[0].url: expected an address as"),
        ("url: 'http://box:x'", "models[0].url: expected an address as"),
        ("url: 'http://[::1'", "models[0].url: expected an address as"),
        ("url: 'http://box/?a=1'", "models[0].url: expected an address as"),
        ("url: 'http://box/#a'", "models[0].url: expected an address as"),
        ("url: 'http://b ox'", "models[0].url: expected an address as"),
        ("url: 'http://bö'", "models[0].url: expected an address as"),
        (f"url: 'http://{'x' * 2048}'", "at most 2048 characters, got 2055 characters"),
        ("url: 'http://h', path: /m.gguf", "models[0].path: expected no such key with engine: external"),
        ("url: 'http://h', gpus: [0]", "models[0].gpus: expected no such key with engine: external"),
        ("url: 'http://h', gpus_per_backend: 2", "models[0].gpus_per_backend: expected no such key"),
        ("url: 'http://h', args: [--x]", "models[0].args: expected no such key"),
        ("url: 'http://h', env: {A: b}", "models[0].env: expected no such key"),
        ("url: 'http://h', startup_timeout: 1m", "models[0].startup_timeout: expected no such key"),
        ("url: 'http://h', llamacpp: {threads: 1}", "models[0].llamacpp: expected no such key"),
        ("url: 'http://h', health: ready", "models[0].health: expected a path such as /health, got ready"),
        ("url: 'http://h', health: '/a b'", "models[0].health: expected a path such as /health"),
        ("url: 'http://h', model: 'a b'", "models[0].model: expected a name without whitespace"),
        ("url: 'http://h', parallel: 257", "models[0].parallel: expected a whole number from 1 to 256"),
        ("url: 'http://h', context: -1", "models[0].context: expected a whole number from 0"),
        ("url: 'http://h', api_key_env: NOT_SET", "a key in the environment variable NOT_SET, got none"),
        ("url: 'http://h', api_key_env: VIIWORK_MESH_SECRET", "a variable other than the mesh secrets'"),
    ],
)  # fmt: skip
def test_what_a_server_may_not_have_is_one_clear_line(refusal, keys: str, said: str):
    assert said in refusal(ENTRY.format(keys))


@pytest.mark.parametrize("key", ["url: http://h:1", "api_key_env: KEY", "health: /h", "model: x"])
def test_an_engine_of_ones_own_has_no_key_of_a_server(refusal, model_file, key: str):
    name = key.partition(":")[0]
    said = f"models[0].{name}: expected no such key with engine: llamacpp, got one"
    assert said in refusal(model_file(key), {"KEY": "k"})


def test_a_login_in_the_address_is_refused_and_not_shown(refusal):
    line = refusal(ENTRY.format("url: 'http://me:hunter2@box'"))
    assert "without a login" in line and "hunter2" not in line


def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(refusal):
    line = refusal(ENTRY.format("url: 'http://h', api_key_env: sk-abcdef-123"))
    assert "the name of an environment variable" in line and "abcdef" not in line


def test_the_key_is_read_from_the_environment_and_not_shown(load):
    loaded = load(ENTRY.format("url: 'http://h', api_key_env: KEY"), {"KEY": " sk-123456789012345 \n"})
    assert loaded.api_keys == {"KEY": "sk-123456789012345"} and "sk-1" not in repr(loaded)


@pytest.mark.parametrize("key", ["a b", "kéy", "a\nX-Evil: 1", "x" * 4097, "a\x00"])
def test_a_key_that_is_no_header_value_is_refused_and_not_shown(refusal, key: str):
    line = refusal(ENTRY.format("url: 'http://h', api_key_env: KEY"), {"KEY": key})
    assert "visible ASCII characters in KEY, got something else" in line


def test_a_file_with_the_key_in_it_is_refused(refusal):
    text = ENTRY.format("url: 'http://h', api_key_env: KEY") + "# sk-123456789012345\n"
    line = refusal(text, {"KEY": "sk-123456789012345"})
    assert (
        line == "f.yaml:3: models[0].api_key_env: expected the secret in KEY alone, got it in this file too"
    )


def test_the_effective_config_of_a_server_loads_again_as_the_same(load):
    keys = "url: 'https://h/api/v1', api_key_env: KEY, health: /v1/models, model: 'org/m:8b', parallel: 4"
    loaded = load(ENTRY.format(keys), {"KEY": "k"})
    assert load(effective_yaml(loaded.config), {"KEY": "k"}).config == loaded.config
