"""One mesh mode, decided by the secret and `mesh.open`; the secret is never seen again."""

from __future__ import annotations

import base64

import pytest

from viiwork.config.load import parse_config
from viiwork.config.render import effective_yaml

KEY, OLD = bytes(range(32)), bytes(range(200, 232))
SECRET, OLD_SECRET = (base64.b64encode(key).decode() for key in (KEY, OLD))
SECURED = "mesh: {}\n"


def env(current: str | None = None, previous: str | None = None) -> dict[str, str]:
    pairs = {"VIIWORK_MESH_SECRET": current, "VIIWORK_MESH_SECRET_PREV": previous}
    return {name: value for name, value in pairs.items() if value is not None}


def test_a_secret_makes_a_secured_mesh(load):
    secrets = load(SECURED, env(SECRET, OLD_SECRET)).secrets
    assert (secrets.current, secrets.previous) == (KEY, OLD)


@pytest.mark.parametrize("around", [("", "\n"), (" ", " "), ("\t", "\r\n")])
def test_blanks_around_a_secret_do_not_matter(load, around: tuple[str, str]):
    assert load(SECURED, env(around[0] + SECRET + around[1])).secrets.current == KEY


def test_the_variable_is_the_one_the_config_names(load):
    assert load("mesh: {secret_env: OTHER}", {"OTHER": SECRET}).secrets.current == KEY


def test_an_open_mesh_has_no_secret(load):
    for blank in (env(), env(""), env("  \n")):
        secrets = load("mesh: {open: true}", blank).secrets
        assert (secrets.current, secrets.previous) == (None, None)


@pytest.mark.parametrize("blank", [env(), env(""), env("\n")])
def test_neither_secret_nor_open_is_refused_with_the_variable(refusal, blank):
    assert refusal("node: {}\nmesh:\n  network: lan\n", blank) == (
        "f.yaml:2: mesh.secret_env: expected a secret in the environment variable VIIWORK_MESH_SECRET, "
        "or mesh.open: true, got neither"
    )


def test_both_secret_and_open_is_refused(refusal):
    line = refusal("mesh:\n  open: true\n", env(SECRET))
    assert line.startswith(
        "f.yaml:2: mesh.open: expected either mesh.open: true or a secret, got an open mesh and"
    )


@pytest.mark.parametrize("text", [SECURED, "mesh: {open: true}"])
def test_a_previous_secret_alone_is_refused(refusal, text: str):
    assert "mesh.secret_prev_env: expected a current secret" in refusal(text, env(None, OLD_SECRET))


@pytest.mark.parametrize("level", ["outgoing", "none"])
def test_a_mesh_that_is_secured_by_half_is_refused(refusal, level: str):
    for is_open, variables in (("true", env()), ("false", env(SECRET))):
        line = refusal(f"mesh:\n  open: {is_open}\n  secret_enforce: {level}\n", variables)
        assert line.startswith("f.yaml:3: mesh.secret_enforce: expected full (gossip is encrypted both ways")


@pytest.mark.parametrize(
    "wrong",
    [
        "x",
        SECRET[:-1],
        SECRET + "=",
        f'"{SECRET}"',
        "\ufeff" + SECRET,
        "é" * 44,
        "\udce9" * 44,
        base64.b64encode(KEY[:31]).decode(),
        base64.b64encode(KEY + b"x").decode(),
        base64.urlsafe_b64encode(b"\xff" * 32).decode(),
        SECRET[:20] + " " + SECRET[21:],
        KEY.hex(),
        "=" * 44,
        "A" * 42 + "==",
        "A" * 44,
        "x" * 100_000,
    ],
)
@pytest.mark.parametrize("which", ["current", "previous"])
def test_what_is_not_the_base64_of_32_bytes_is_refused_and_not_shown(refusal, wrong: str, which: str):
    line = refusal(SECURED, env(wrong) if which == "current" else env(SECRET, wrong))
    assert "expected the standard base64 of 32 bytes in VIIWORK_MESH_SECRET" in line
    assert len(wrong) < 2 or wrong not in line
    assert SECRET not in line


def test_a_secret_behind_a_byte_order_mark_is_told_so(refusal):
    assert "45 characters (a byte order mark included)" in refusal(SECURED, env("\ufeff" + SECRET))


def test_a_secret_in_quotes_is_told_so(refusal):
    assert refusal(SECURED, env(f'"{SECRET}"')).endswith("got 46 characters (quotes included) instead of 44")


@pytest.mark.parametrize(
    "text",
    [
        "mesh: {{secret_env: '{}'}}",
        "mesh: {{secret: '{}'}}",
        "mesh: {{advertise: '{}'}}",
        "mesh: {{network: '{}'}}",
        "mesh: {{seeds: ['{}']}}",
        "mesh: {{'{}': 1}}",
        "api: {{port: {}}}",
        "api: {{port: 'x {} x'}}",
        "{}: x",
        "{}",
        "a: !{} x",
        "a: *{}",
        "models: [{{name: m, engine: llamacpp, path: /m, context: 1, env: {{TOKEN: '{}'}}}}]",
    ],
)
def test_a_secret_pasted_into_the_file_is_refused_and_not_shown(refusal, text: str):
    line = refusal(text.format(SECRET) + "\n# mesh", env(SECRET))
    assert SECRET not in line
    assert SECRET.rstrip("=") not in line


def test_no_shown_form_of_a_loaded_config_holds_the_secret():
    loaded = parse_config(SECURED.encode(), "f.yaml", env(SECRET, OLD_SECRET))
    for form in (repr(loaded), str(loaded), effective_yaml(loaded.config)):
        for key in (KEY, OLD):
            assert repr(key) not in form
            assert key.hex() not in form
            assert base64.b64encode(key).decode() not in form
