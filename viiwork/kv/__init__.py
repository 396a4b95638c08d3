"""kv_share: the worker process that moves KV bytes, and the control side of it."""
