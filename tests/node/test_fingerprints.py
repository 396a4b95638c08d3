from __future__ import annotations

from pathlib import Path

import pytest

from viiwork.config.model import ModelSection
from viiwork.errors import ModelFileError
from viiwork.node.fingerprints import StateFingerprints, changing_args


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
