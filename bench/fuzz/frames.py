"""Coverage-guided fuzzing of the channel: hellos, and frames of a peer that holds the secret and lies.

    pip install -e '.[fuzz]'
    python bench/fuzz/frames.py -runs=200000 -rss_limit_mb=512 [CORPUS]

The first byte chooses: a hello as it is, one with the right proof, a frame as it is, one sealed with the
right keys. What opens is unpacked as the receiver does it. Faults stop it: an exception that is not a
`KvError`, or more bytes than the header says. The memory limit is the bound on what a claim may allocate.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["viiwork"]):
    from viiwork.kv import compress
    from viiwork.wire import channel

from blake3 import blake3

from viiwork.errors import KvError

KEY = channel.mesh_key("fuzz")
FRONT = channel.HELLO_BYTES - channel.PROOF_BYTES
KEYS = channel.Keys(bytes(32), bytes(32))


def hello(data: bytes) -> None:
    side = channel.Responder((KEY, bytes(32)), "b", b"2" * 32, aes=bool(data[-1:] > b"\x7f"))
    side.answer(data, "a", require_encrypt=False)
    side.finish(data[-channel.PROOF_BYTES :])


def proven_hello(data: bytes) -> None:
    body = data[:FRONT].ljust(FRONT, b"\0")
    hello(body + blake3(b"hello\0" + body, key=KEY).digest())


def frame(data: bytes, sealed: bool = False) -> None:
    if len(data) < channel.HEADER_BYTES:
        return
    header = channel.read_header(data[: channel.HEADER_BYTES], 0)
    payload = data[channel.HEADER_BYTES :]
    if sealed:
        if len(payload) != header.wire_len:
            return
        payload += _tag(header, payload)
    opened, digest = channel.Opener(KEYS, encrypt=False).open(header, bytearray(payload))
    assert len(opened) == header.wire_len and digest == blake3(opened).digest()
    if header.codec is not channel.Codec.RAW:
        assert len(UNPACKER.unpack(opened, header.codec, header.raw_bytes)) == header.raw_bytes


def _tag(header: channel.Header, payload: bytes) -> bytes:
    sealer = channel.Sealer(KEYS, encrypt=False)
    return sealer.prove(header, blake3(payload).digest()).tag


def sealed_frame(data: bytes) -> None:
    frame(data, sealed=True)


UNPACKER = compress.Unpacker()
READERS = (hello, proven_hello, frame, sealed_frame)


def one(data: bytes) -> None:
    if not data:
        return
    try:
        READERS[data[0] % len(READERS)](data[1:])
    except KvError:
        return


def seeds() -> list[bytes]:
    found = []
    for encrypt, aes in ((False, False), (True, False), (True, True)):
        said = channel.Initiator(KEY, "a", b"1" * 32, encrypt=encrypt, aes=aes).hello()
        found += [b"\0" + said, b"\1" + said[:FRONT]]
    packer = compress.Packer()
    rows = memoryview(bytes(range(64)) * 16)
    for codec in channel.Codec:
        payload = rows if codec is channel.Codec.RAW else packer.pack(rows, codec)
        assert payload is not None
        sealed = channel.Sealer(KEYS, encrypt=False).seal(
            channel.FrameType.ROWS, payload, rows=16, raw_len=len(rows), codec=codec
        )
        plain = sealed.header + bytes(sealed.payload)
        found += [b"\2" + plain + sealed.tag, b"\3" + plain]
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for at, seed in enumerate(seeds()):
            one(seed)
            (Path(folder) / str(at)).write_bytes(seed)
        atheris.Setup([*sys.argv, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
