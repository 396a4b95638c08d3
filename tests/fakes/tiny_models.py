"""Tiny random models with another model's tokenizer: loaded in a second, with states of every form.

`llama` is dense, `gemma3` has a sliding window, `qwen35` is a hybrid of attention and recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

WIDTH, HEADS, KV_HEADS, HEAD = 64, 2, 1, 64
CONTEXT = 65_536
WINDOW = 128  # tokens gemma3's sliding layers look back
SCALE = 0.15  # of the weights: large enough that what is said next depends on all that was said


class Maker:
    """Writes one model; weights are the same on every run."""

    def __init__(self, base: GGUFReader, path: Path, arch: str) -> None:
        self.rng = np.random.default_rng(1)
        self.writer = GGUFWriter(str(path), arch)
        self.arch = arch
        self.writer.add_name(f"tiny-{arch}")
        self._tokenizer(base)
        self.n_vocab = len(base.fields["tokenizer.ggml.tokens"].contents())

    def _tokenizer(self, base: GGUFReader) -> None:
        add: dict[GGUFValueType, Callable[[str, Any], None]] = {
            GGUFValueType.ARRAY: self.writer.add_array,
            GGUFValueType.STRING: self.writer.add_string,
            GGUFValueType.UINT32: self.writer.add_uint32,
            GGUFValueType.BOOL: self.writer.add_bool,
        }
        for name, field in base.fields.items():
            if name.startswith("tokenizer."):
                add[field.types[0]](name, field.contents())

    def facts(self, **values: int | float | list[int]) -> None:
        for name, value in values.items():
            key = f"{self.arch}.{name.replace('__', '.')}"
            if isinstance(value, list):
                self.writer.add_array(key, value)
            elif isinstance(value, float):
                self.writer.add_float32(key, value)
            else:
                self.writer.add_uint32(key, value)

    def attention_facts(self, layers: int, ff: int) -> None:
        self.facts(context_length=CONTEXT, embedding_length=WIDTH, feed_forward_length=ff, block_count=layers)
        self.facts(attention__head_count=HEADS, attention__head_count_kv=KV_HEADS)
        self.facts(attention__key_length=HEAD, attention__value_length=HEAD)
        self.facts(attention__layer_norm_rms_epsilon=1e-6, rope__freq_base=1e6)

    def random(self, name: str, *shape: int, scale: float = SCALE) -> None:
        """A tensor; the shape is in ggml's order."""
        values = self.rng.standard_normal(shape[::-1]) * scale
        self.writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def ones(self, name: str, size: int = WIDTH) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def frame(self, scale: float = 0.3) -> None:
        # With larger ones the answer would only repeat the last token, whatever the state says.
        self.random("token_embd", WIDTH, self.n_vocab, scale=scale)
        self.ones("output_norm")

    def attention(self, block: str, *, gated: bool = False, normed: bool = True) -> None:
        self.random(f"{block}.attn_q", WIDTH, HEAD * HEADS * (2 if gated else 1))
        self.random(f"{block}.attn_k", WIDTH, HEAD * KV_HEADS)
        self.random(f"{block}.attn_v", WIDTH, HEAD * KV_HEADS)
        self.random(f"{block}.attn_output", HEAD * HEADS, WIDTH)
        if normed:
            self.ones(f"{block}.attn_q_norm", HEAD)
            self.ones(f"{block}.attn_k_norm", HEAD)

    def feed_forward(self, block: str, ff: int) -> None:
        self.random(f"{block}.ffn_gate", WIDTH, ff)
        self.random(f"{block}.ffn_up", WIDTH, ff)
        self.random(f"{block}.ffn_down", ff, WIDTH)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def llama(base: GGUFReader, path: Path) -> None:
    layers, ff = 4, 128
    made = Maker(base, path, "llama")
    made.attention_facts(layers, ff)
    made.facts(rope__dimension_count=HEAD)
    made.frame()
    for i in range(layers):
        block = f"blk.{i}"
        made.ones(f"{block}.attn_norm")
        made.ones(f"{block}.ffn_norm")
        made.attention(block, normed=False)
        made.feed_forward(block, ff)
    made.close()


def gemma3(base: GGUFReader, path: Path) -> None:
    layers, ff = 12, 128
    made = Maker(base, path, "gemma3")
    made.attention_facts(layers, ff)
    made.facts(attention__sliding_window=WINDOW)
    made.frame(0.1)  # the engine multiplies them by the root of the width
    for i in range(layers):
        block = f"blk.{i}"
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            made.ones(f"{block}.{norm}")
        made.attention(block)
        made.feed_forward(block, ff)
    made.close()


def qwen35(base: GGUFReader, path: Path) -> None:
    layers, ff, every = 8, 128, 4
    made = Maker(base, path, "qwen35")
    made.attention_facts(layers, ff)
    made.facts(rope__dimension_count=32, rope__dimension_sections=[6, 5, 5, 0])
    made.facts(full_attention_interval=every, ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=64)
    made.facts(ssm__time_step_rank=2, ssm__group_count=1)
    made.frame()
    for i in range(layers):
        block = f"blk.{i}"
        made.ones(f"{block}.attn_norm")
        made.ones(f"{block}.post_attention_norm")
        if (i + 1) % every == 0:
            made.attention(block, gated=True)
        else:
            _delta_net(made, block)
        made.feed_forward(block, ff)
    made.close()


def _delta_net(made: Maker, block: str, state: int = 64, heads: int = 2) -> None:
    key, value = state, state * heads
    made.random(f"{block}.attn_qkv", WIDTH, 2 * key + value)
    made.random(f"{block}.attn_gate", WIDTH, value)
    made.random(f"{block}.ssm_conv1d", 4, 2 * key + value, scale=0.3)
    made.random(f"{block}.ssm_beta", WIDTH, heads)
    made.random(f"{block}.ssm_alpha", WIDTH, heads)
    made.random(f"{block}.ssm_out", value, WIDTH)
    made.ones(f"{block}.ssm_norm", state)
    for name, sign in (("ssm_dt", 1.0), ("ssm_a", -1.0)):
        values = np.abs(made.rng.standard_normal(heads) * 0.5) * sign
        full = f"{block}.{name}" + (".bias" if name == "ssm_dt" else "")
        made.writer.add_tensor(full, values.astype(np.float32))


MODELS: dict[str, Callable[[GGUFReader, Path], None]] = {"llama": llama, "gemma3": gemma3, "qwen35": qwen35}


def make_tiny_model(kind: str, tokenizer: Path, folder: Path) -> Path:
    """`tokenizer` is a GGUF file whose tokenizer the model takes; the model's path."""
    path = folder / f"tiny-{kind}.gguf"
    MODELS[kind](GGUFReader(str(tokenizer)), path)
    return path
