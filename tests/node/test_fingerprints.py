from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_models import WINDOW
from viiwork.config.model import ModelSection
from viiwork.errors import ModelFileError
from viiwork.node.fingerprints import StateFingerprints, changing_args, micro_batch


@pytest.mark.parametrize(
    ("args", "counting"),
    [
        ((), []),
        (("--threads", "4", "-ngl", "99", "--no-mmap"), []),
        (("--kv-unified", "--no-cache-idle-slots"), []),
        (("--threads=4", "--rope-scale", "2"), ["--rope-scale", "2"]),
        (("--lora", "/a.gguf", "--mlock"), ["--lora", "/a.gguf"]),
        (("--new-flag-of-2030",), ["--new-flag-of-2030"]),
    ],
)
def test_args_count_unless_they_are_known_to_change_nothing(args, counting):
    assert list(changing_args(args)) == counting


def model(path: Path, *args: str) -> ModelSection:
    return ModelSection(name="m", engine="llamacpp", path=str(path), context=512, args=args)


async def test_the_same_weights_have_one_fingerprint_whatever_their_path_and_harmless_args(
    smollm2: Path, tmp_path: Path
):
    link = tmp_path / "other-name.gguf"
    link.symlink_to(smollm2)
    here = await StateFingerprints([model(smollm2)]).of("m")
    there = await StateFingerprints([model(link, "--threads", "3")]).of("m")
    assert here == there and len(here) == 32


async def test_args_that_change_results_change_the_fingerprint(smollm2: Path):
    plain = await StateFingerprints([model(smollm2)]).of("m")
    scaled = await StateFingerprints([model(smollm2, "--rope-scale", "2")]).of("m")
    assert plain != scaled


async def test_a_lora_counts_by_its_content(smollm2: Path, tmp_path: Path):
    loras = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for number, lora in enumerate(loras):
        data = bytearray(smollm2.read_bytes()[: 8 << 20])
        data[-1] = number  # the same size and name length, another byte
        lora.write_bytes(data)
    with pytest.raises(ModelFileError):
        await StateFingerprints([model(smollm2, "--lora", str(loras[0]))]).of("m")
    whole = [tmp_path / "c.gguf", tmp_path / "d.gguf"]
    for path in whole:
        path.symlink_to(smollm2)
    prints = [await StateFingerprints([model(smollm2, "--lora", str(p))]).of("m") for p in whole]
    assert prints[0] == prints[1]


@pytest.mark.parametrize(
    ("args", "env", "n_tokens"),
    [
        ((), {}, 512),
        (("-ub", "256"), {}, 256),
        (("--ubatch-size=1024", "-c", "7"), {}, 1024),
        (("--batch-size", "128"), {}, 128),
        (("-ub", "4096", "-b", "4096"), {}, 4096),
        (("-ub", "4096"), {}, 2048),
        ((), {"LLAMA_ARG_UBATCH": "64"}, 64),
        (("-ub", "32"), {"LLAMA_ARG_UBATCH": "64"}, 32),
        (("-ub",), {}, 512),
    ],
)
def test_the_micro_batch_is_what_the_arguments_bound_it_to(args, env, n_tokens):
    assert micro_batch(args, env) == n_tokens


async def test_a_sliding_window_cache_takes_the_window_and_a_micro_batch(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    gemma = tiny_models["gemma3"]
    assert await StateFingerprints([model(gemma)]).swa_rows("m") == WINDOW + 512
    assert await StateFingerprints([model(gemma, "-ub", "64")]).swa_rows("m") == WINDOW + 64
    assert await StateFingerprints([model(gemma, "--swa-full")]).swa_rows("m") is None
    assert await StateFingerprints([model(tiny_models["llama"])]).swa_rows("m") == 0
    monkeypatch.setenv("LLAMA_ARG_SWA_FULL", "1")
    assert await StateFingerprints([model(gemma)]).swa_rows("m") is None
