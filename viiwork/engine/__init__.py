"""llama.cpp on this machine: command line, process, probes, supervision, slots."""
