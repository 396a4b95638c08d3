"""A real engine in a process of its own; it ends when its standard input does."""

import sys

import xllamacpp

model, slots, ctx, folder, port, cache = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = model
params.n_parallel = int(slots)
params.n_ctx = int(ctx) * int(slots)
params.kv_unified = False
params.slot_save_path = folder + "/"
params.endpoint_slots = True
params.hostnames = ["127.0.0.1"]
params.port = int(port)
params.cpuparams.n_threads = 1  # two engines and two workers share the machine
params.cache_ram_mib = 0
params.ui = False
if cache == "transposed":
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
elif cache == "q8_0":
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
server = xllamacpp.Server(params)
print("ready", flush=True)
sys.stdin.read()
