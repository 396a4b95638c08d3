"""`python -m viiwork.engine.embedded ARGS`: llama-server's command line for the engine in xllamacpp.

Same endpoints, same arguments as far as they are known here; any other argument is a usage error (exit 2).
It answers 503 while the model loads. SIGTERM ends the process at once: there is nothing to put away.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any, NoReturn

_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io")
_POOLING = ("none", "mean", "cls", "last", "rank")


def parser() -> argparse.ArgumentParser:
    """The arguments of llama-server this engine takes."""
    args = argparse.ArgumentParser(prog="embedded engine", usage=argparse.SUPPRESS, allow_abbrev=False)
    add = args.add_argument
    add("-m", "--model", required=True)
    add("-a", "--alias", default="")
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True)
    add("-c", "--ctx-size", type=int, default=0)
    add("-np", "--parallel", type=int, default=1)
    add("-ngl", "--n-gpu-layers", "--gpu-layers", type=int, default=-1)
    add("--slots", action=argparse.BooleanOptionalAction, default=True)
    add("--metrics", action="store_true")
    add("--props", action="store_true")
    add("-kvu", "--kv-unified", action=argparse.BooleanOptionalAction, default=False)
    add("--no-webui", "--no-ui", dest="ui", action="store_false")
    add("-lv", "--log-verbosity", "--verbosity", type=int, default=1)
    add("--log-disable", action="store_const", const=0, dest="log_verbosity")
    add("--slot-save-path", default="")
    add("-ctk", "--cache-type-k", choices=_CACHE_TYPES, default="f16")
    add("-ctv", "--cache-type-v", choices=_CACHE_TYPES, default="f16")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto")
    add("-cram", "--cache-ram", type=int, default=None)
    add("-t", "--threads", type=int, default=-1)
    add("-tb", "--threads-batch", type=int, default=None)
    add("--threads-http", type=int, default=None)
    add("-b", "--batch-size", type=int, default=None)
    add("-ub", "--ubatch-size", type=int, default=None)
    add("-n", "--predict", "--n-predict", type=int, default=None)
    add("-sm", "--split-mode", choices=("layer", "row", "none"), default="layer")
    add("-ts", "--tensor-split", default="")
    add("-mg", "--main-gpu", type=int, default=0)
    add("--load-mode", choices=_LOAD_MODES, default="auto")
    add("--no-mmap", action="store_const", const="none", dest="load_mode")
    add("--mlock", action="store_const", const="mlock", dest="load_mode")
    add("--swa-full", action="store_true")
    add("--ctx-checkpoints", "--swa-checkpoints", type=int, default=None)
    add("--checkpoint-min-step", type=int, default=None)
    add("-sps", "--slot-prompt-similarity", type=float, default=None)
    add("--cache-idle-slots", action=argparse.BooleanOptionalAction, default=True)
    add("--cache-reuse", type=int, default=None)
    add("--context-shift", action=argparse.BooleanOptionalAction, default=False)
    add("--warmup", action=argparse.BooleanOptionalAction, default=True)
    add("--jinja", action=argparse.BooleanOptionalAction, default=True)
    add("--chat-template", default="")
    add("--embedding", "--embeddings", action="store_true")
    add("--reranking", "--rerank", action="store_true")
    add("--pooling", choices=_POOLING, default=None)
    add("--mmproj", default="")
    return args


def fill(params: Any, args: argparse.Namespace, lib: Any) -> None:
    """Put the arguments into the engine's parameters; `lib` is the xllamacpp module."""
    params.model.path = args.model
    params.model_alias = {name for name in args.alias.split(",") if name}
    params.hostnames = [args.host]
    params.port = args.port
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.n_gpu_layers = args.n_gpu_layers
    params.endpoint_slots = args.slots
    params.endpoint_metrics = args.metrics
    params.endpoint_props = args.props
    params.kv_unified = args.kv_unified
    params.ui = args.ui
    params.verbosity = args.log_verbosity
    params.slot_save_path = os.path.join(args.slot_save_path, "") if args.slot_save_path else ""
    params.cache_type_k = getattr(lib.ggml_type, f"GGML_TYPE_{args.cache_type_k.upper()}")
    params.cache_type_v = getattr(lib.ggml_type, f"GGML_TYPE_{args.cache_type_v.upper()}")
    flash = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}[args.flash_attn]
    params.flash_attn_type = getattr(lib.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}")
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads if args.threads_batch is None else args.threads_batch
    params.main_gpu = args.main_gpu
    modes = type(params.split_mode)
    params.split_mode = getattr(modes, f"LLAMA_SPLIT_MODE_{args.split_mode.upper()}")
    if args.tensor_split:
        shares = [float(share) for share in args.tensor_split.split(",")]
        params.tensor_split = shares + [0.0] * (len(params.tensor_split) - len(shares))
    params.load_mode = getattr(lib.llama_load_mode, f"LLAMA_LOAD_MODE_{args.load_mode.upper()}")
    params.swa_full = args.swa_full
    params.cache_idle_slots = args.cache_idle_slots
    params.ctx_shift = args.context_shift
    params.warmup = args.warmup
    params.use_jinja = args.jinja
    params.chat_template = args.chat_template
    params.embedding = args.embedding or args.reranking
    pooling = "rank" if args.reranking else args.pooling
    if pooling:
        params.pooling_type = getattr(lib.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    if args.mmproj:
        params.mmproj.path = args.mmproj
    optional = {
        "cache_ram_mib": args.cache_ram,
        "n_threads_http": args.threads_http,
        "n_batch": args.batch_size,
        "n_ubatch": args.ubatch_size,
        "n_predict": args.predict,
        "n_ctx_checkpoints": args.ctx_checkpoints,
        "checkpoint_min_step": args.checkpoint_min_step,
        "slot_prompt_similarity": args.slot_prompt_similarity,
        "n_cache_reuse": args.cache_reuse,
    }
    for name, value in optional.items():
        if value is not None:
            setattr(params, name, value)


def main(argv: list[str]) -> NoReturn:
    """Serve until killed; exit 2 for a wrong command line, 1 when the engine cannot start."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also while the engine's own code holds this thread
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when its engines end
    command = parser()
    args = command.parse_args(argv)
    if not os.path.isfile(args.model):
        command.error(f"no file {args.model}")
    import xllamacpp

    params = xllamacpp.CommonParams()
    try:
        fill(params, args, xllamacpp)
    except (AttributeError, TypeError, ValueError) as error:
        command.error(str(error))
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"the engine did not start: {error}")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # loading may have installed handlers
    threading.Event().wait()
    raise AssertionError(f"unreachable: {server} serves until the process is killed")


if __name__ == "__main__":
    main(sys.argv[1:])
