"""Data payloads made smaller: byte planes and zstandard, and back; bounded by what the header says."""

from __future__ import annotations

import zstandard

from viiwork.errors import ChannelError
from viiwork.kv.buffers import new_buffer
from viiwork.limits import KV_COMPRESS_GAIN, KV_COMPRESS_LEVEL, KV_FRAME_MAX_BYTES
from viiwork.native.rows import merge_planes, split_planes
from viiwork.wire.channel import Codec
from viiwork.wire.state import GGML_TYPES, CacheShape

_PLANES = {Codec.PLANES2_ZSTD: 2, Codec.PLANES4_ZSTD: 4}


def codec_of(cache: CacheShape) -> Codec:
    """Planes of the values' width where all of a cache have one; blocks of quantised rows have none."""
    widths = {
        GGML_TYPES[plane.type][2] if GGML_TYPES[plane.type][1] == 1 else 0 for plane in (*cache.k, *cache.v)
    }
    return {2: Codec.PLANES2_ZSTD, 4: Codec.PLANES4_ZSTD}.get(
        widths.pop() if len(widths) == 1 else 0, Codec.ZSTD
    )


class Packer:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=KV_COMPRESS_LEVEL, write_checksum=False)
        self._planes = new_buffer(KV_FRAME_MAX_BYTES)

    def pack(self, payload: memoryview, codec: Codec) -> bytes | None:
        """The payload as it travels; None when it is not worth it."""
        source = payload
        width = _PLANES.get(codec, 0)
        if width:
            if len(payload) % width:
                return None
            source = self._planes[: len(payload)]
            split_planes(payload, source, width)
        packed = self._zstd.compress(source)
        return packed if len(packed) < KV_COMPRESS_GAIN * len(payload) else None


class Unpacker:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor()
        self._merged = new_buffer(KV_FRAME_MAX_BYTES)

    def unpack(self, payload: bytes | bytearray | memoryview, codec: Codec, raw_bytes: int) -> memoryview:
        """Raises `ChannelError` (`corrupt`); never makes more than `raw_bytes`, which is capped."""
        try:
            # A frame without its size in its header is refused by max_output_size, one with another below.
            if zstandard.frame_content_size(bytes(payload[:32])) != raw_bytes:
                raise ChannelError("corrupt", "a compressed frame of another size")
            raw = self._zstd.decompress(payload, max_output_size=raw_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ChannelError("corrupt", f"a frame cannot be decompressed: {error}") from None
        width = _PLANES.get(codec, 0)
        if len(raw) != raw_bytes or (width and raw_bytes % width):
            raise ChannelError("corrupt", "a compressed frame of another size")
        if not width:
            return memoryview(raw)
        merged = self._merged[:raw_bytes]
        merge_planes(raw, merged, width)
        return merged
