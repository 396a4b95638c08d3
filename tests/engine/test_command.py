"""Argv and environment of a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from viiwork.config.model import LlamacppSection, ModelSection, Tri
from viiwork.engine.binary import resolve_binary
from viiwork.engine.command import (
    EMBEDDED_FLAGS,
    Command,
    EngineFlags,
    HostFacts,
    llamacpp_command,
    wrong_cards,
)
from viiwork.engine.embedded import parser
from viiwork.engine.supervisor import load_order
from viiwork.errors import EngineUsageError

NEW_HELP = """\
-fa,   --flash-attn [on|off|auto]       set Flash Attention use ('on', 'off', or 'auto', default: 'auto')
-cram, --cache-ram N                    set the maximum cache size in MiB
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer
--cache-idle-slots, --no-cache-idle-slots
                                        save and clear idle slots
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 0: generic output
                                         - 1: error
-lm,   --load-mode MODE                 how the model is read
--ui, --webui, --no-ui, --no-webui      whether to enable the web interface
"""
OLD_HELP = """\
-fa,   --flash-attn                     enable Flash Attention (default: disabled)
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Messages with a higher verbosity will be
                                        ignored.
--no-mmap                               do not memory-map model
"""
NEW, OLD = EngineFlags.from_help(NEW_HELP), EngineFlags.from_help(OLD_HELP)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def command(
    path: Path, index: int = 0, flags: EngineFlags = NEW, facts: HostFacts | None = None, **fields: Any
) -> Command:
    fields = {"context": 1000, "parallel": 2} | fields
    model = ModelSection(name="qwen", engine="llamacpp", path=str(path), **fields)
    node_env = {"PATH": "/bin", "SECRET": "s", "ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}
    return llamacpp_command(
        model,
        index,
        4711,
        program=("/bin/llama-server",),
        flags=flags,
        facts=facts or HostFacts(cpus=8, ram_bytes=100, vendor="none"),
        node_env=node_env,
        hidden_env=frozenset({"SECRET"}),
        save_dir=Path("/dev/shm/x"),
    )


def value(made: Command, flag: str) -> str:
    return made.argv[made.argv.index(flag) + 1]


@pytest.mark.parametrize("arg", ["-kvu", "--kv-unified"])
def test_an_engine_with_one_cache_for_all_slots_leaves_idle_slots_alone(weights: Path, arg: str):
    argv = command(weights, args=(arg,)).argv
    assert argv.index("--no-cache-idle-slots") < argv.index(arg)  # the operator's own word comes last
    assert "--no-cache-idle-slots" not in command(weights).argv
    assert "--no-cache-idle-slots" not in command(weights, flags=OLD, args=(arg,)).argv


def test_help_tells_which_flags_a_build_knows() -> None:
    assert EngineFlags(True, True, True, True, True, "--no-webui", True) == NEW
    assert EngineFlags() == OLD
    assert EngineFlags.from_help("\x00 garbage --no-kv-unified-ish") == EngineFlags()


def test_context_is_tokens_per_slot_and_slots_have_streams_of_their_own(weights: Path) -> None:
    made = command(weights)
    assert (value(made, "--ctx-size"), value(made, "--parallel")) == ("2000", "2")
    assert "--no-kv-unified" in made.argv
    assert value(made, "--slot-save-path") == "/dev/shm/x/"
    assert (value(made, "--host"), value(made, "--port"), value(made, "--alias")) == (
        "127.0.0.1",
        "4711",
        "qwen",
    )


def test_flags_a_build_does_not_know_are_not_passed(weights: Path) -> None:
    options = LlamacppSection(cache_ram_mib=64, flash_attn=Tri("on"))
    old = command(weights, flags=OLD, llamacpp=options).argv
    assert not {"--no-kv-unified", "--cache-ram", "--no-webui", "--log-verbosity"} & set(old)
    assert "--log-disable" in old and old[old.index("--flash-attn") + 1].startswith("--")
    assert value(command(weights, llamacpp=options), "--flash-attn") == "on"
    assert "--flash-attn" not in command(weights, flags=OLD).argv


def test_operator_arguments_come_last(weights: Path) -> None:
    assert command(weights, args=("--ctx-size", "9")).argv[-2:] == ("--ctx-size", "9")


def test_operator_no_mmap_is_translated_for_builds_that_renamed_it(weights: Path) -> None:
    assert command(weights, args=("--no-mmap",)).argv[-2:] == ("--load-mode", "none")
    assert command(weights, flags=OLD, args=("--no-mmap",)).argv[-1] == "--no-mmap"


@pytest.mark.parametrize(("size", "mapped"), [(79, True), (80, False)])
def test_weights_near_the_size_of_memory_are_not_mapped(weights: Path, size: int, mapped: bool) -> None:
    facts = HostFacts(cpus=1, ram_bytes=100, weights_bytes={str(weights): size})
    assert ("--load-mode" not in command(weights, facts=facts).argv) == mapped
    assert ("--no-mmap" not in command(weights, flags=OLD, facts=facts).argv) == mapped


def test_threads_are_shared_between_the_backends_of_a_model(weights: Path) -> None:
    assert value(command(weights), "--threads") == "8"
    assert value(command(weights, gpus=(0, 1, 2, 3)), "--threads") == "2"
    assert value(command(weights, facts=HostFacts(cpus=1), gpus=(0, 1)), "--threads") == "1"
    assert value(command(weights, llamacpp=LlamacppSection(threads=5)), "--threads") == "5"


def test_environment_is_the_nodes_without_secrets_and_foreign_pinning(weights: Path) -> None:
    env = command(weights).env
    assert env["PATH"] == "/bin" and env["MALLOC_ARENA_MAX"] == "4"
    assert not {"SECRET", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & env.keys()
    assert command(weights, env={"SECRET": "mine", "MALLOC_ARENA_MAX": "1"}).env["SECRET"] == "mine"


def test_backend_sees_its_own_cards_in_the_order_of_the_config(weights: Path) -> None:
    facts = HostFacts(cpus=8, vendor="nvidia")
    made = command(weights, index=1, facts=facts, gpus=(5, 4, 3, 2), gpus_per_backend=2)
    assert (made.env["CUDA_VISIBLE_DEVICES"], made.env["CUDA_DEVICE_ORDER"]) == ("3,2", "PCI_BUS_ID")
    assert (value(made, "--split-mode"), value(made, "--tensor-split")) == ("layer", "1,1")
    assert "--main-gpu" not in made.argv and value(made, "--n-gpu-layers") == "-1"
    amd = command(weights, facts=HostFacts(vendor="amd"), gpus=(1,))
    assert amd.env["ROCR_VISIBLE_DEVICES"] == "1" and "--split-mode" not in amd.argv


def test_backend_on_the_cpu_sees_no_card(weights: Path) -> None:
    made = command(weights, facts=HostFacts(vendor="nvidia"))
    assert made.env["CUDA_VISIBLE_DEVICES"] == "" and value(made, "--n-gpu-layers") == "0"


def test_cards_are_wrong_only_when_the_tool_shows_our_processes_on_others() -> None:
    shown = {0: frozenset({10}), 1: frozenset({10, 99}), 2: frozenset({98})}
    assert wrong_cards((0, 1), {10, 11}, shown) == ""
    assert wrong_cards((0,), {10, 11}, shown) == "it runs on cards 0, 1, assigned: 0"
    assert wrong_cards((), {98}, shown) == "it runs on cards 2, assigned: none"
    assert wrong_cards((0,), {5}, shown) is None and wrong_cards((0,), {5}, {}) is None


def test_row_split_names_the_main_card(weights: Path) -> None:
    options = LlamacppSection(split_mode="row", split_weights=(3, 1.5), main_gpu=1)
    made = command(weights, gpus=(0, 1), gpus_per_backend=2, llamacpp=options)
    assert (value(made, "--tensor-split"), value(made, "--main-gpu")) == ("3,1.5", "1")


def test_directory_or_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineUsageError, match="is a directory"):
        command(tmp_path)
    with pytest.raises(EngineUsageError, match="no file"):
        command(tmp_path / "none.gguf")
    (tmp_path / "junk.gguf").write_bytes(b"no model at all")
    with pytest.raises(EngineUsageError, match="not a GGUF file"):
        command(tmp_path / "junk.gguf")


def test_embedded_engine_takes_every_argument_we_write(weights: Path) -> None:
    options = LlamacppSection(cache_ram_mib=-1, split_mode="row")
    facts = HostFacts(ram_bytes=1, weights_bytes={str(weights): 1})
    made = command(
        weights, flags=EMBEDDED_FLAGS, facts=facts, llamacpp=options, gpus=(0, 1), gpus_per_backend=2
    )
    args = parser().parse_args(made.argv[1:])
    assert (args.ctx_size, args.parallel, args.kv_unified, args.n_gpu_layers) == (2000, 2, False, -1)
    assert (args.cache_ram, args.load_mode, args.ui, args.flash_attn) == (-1, "none", False, "auto")


def test_first_backend_of_every_model_loads_before_any_second() -> None:
    models = [
        ModelSection(name=name, engine="llamacpp", path="x", context=1, gpus=tuple(range(count)))
        for name, count in (("a", 3), ("b", 0), ("c", 2))
    ]
    order = [(model.name, index) for model, index in load_order(models)]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("c", 1), ("a", 2)]


def test_engine_on_the_path_is_preferred_to_the_embedded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolve_binary("").embedded and resolve_binary("embedded").embedded
    (tmp_path / "llama-server").write_text("#!/bin/sh\n")
    (tmp_path / "llama-server").chmod(0o755)
    assert resolve_binary("").program == (str(tmp_path / "llama-server"),)
    assert resolve_binary("llama-server").program == (str(tmp_path / "llama-server"),)


def test_no_engine_at_all_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineUsageError, match=r"viiwork\[embedded\]"):
        resolve_binary("")
    with pytest.raises(EngineUsageError, match="needs the extra"):
        resolve_binary("embedded")
