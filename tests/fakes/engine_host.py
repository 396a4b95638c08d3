"""A real engine in a process of its own; it ends when its standard input does."""

import json
import sys

import xllamacpp

options = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = options["model"]
params.n_parallel = options["slots"]
params.n_ctx = options["ctx"] * options["slots"]
params.kv_unified = options["unified"]
params.slot_save_path = options["folder"] + "/"
params.endpoint_slots = True
params.hostnames = ["127.0.0.1"]
params.port = options["port"]
params.cpuparams.n_threads = 1
params.cache_ram_mib = 0
params.ui = False
if options["transposed"]:
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if options["quantised"]:
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
server = xllamacpp.Server(params)
print("ready", flush=True)
sys.stdin.read()
