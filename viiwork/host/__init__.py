"""Facts about this machine: GPUs, model files, memory, network interfaces."""
