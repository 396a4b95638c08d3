"""One state on its way into the store: what of it is held, what is written, what is proven so far."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from viiwork.errors import ChannelError, KvError
from viiwork.kv.buffers import new_buffer
from viiwork.kv.files import pread_of
from viiwork.kv.link import Cancel, file_errors
from viiwork.kv.rowfile import RowFile
from viiwork.kv.store import Claim, ReplicaStore
from viiwork.limits import KV_CHECKPOINTS_KEPT, KV_FRAME_MAX_BYTES, KV_PREFIX_TOKENS, KV_RECURRENT_KEPT
from viiwork.native.mover import pwrite_all
from viiwork.wire.channel import FrameType
from viiwork.wire.checkpoint import check_checkpoint
from viiwork.wire.delta import starts_of
from viiwork.wire.groups import DIGEST_BYTES, Piece, groups_of
from viiwork.wire.replica import (
    TOKEN_BYTES,
    BlobFacts,
    BlobManifest,
    CacheManifest,
    Commit,
    Have,
    Manifest,
    Offer,
    common_prefix,
)
from viiwork.wire.savefile import check_recurrent


@dataclass(slots=True)
class _Part:
    """A blob that is coming in."""

    facts: BlobFacts
    fd: int
    hash: blake3
    digest: bytes = b""


class Incoming:
    """Belongs to one thread at a time. `close` ends it in every case; before `commit` nothing is replaced."""

    def __init__(self, store: ReplicaStore, offer: Offer, cancel: Cancel) -> None:
        self._store, self._offer = store, offer
        self._claim: Claim = store.claim(offer, cancel)
        self._rows = [
            RowFile(fd, cache) for fd, cache in zip(self._claim.files, offer.shape.caches, strict=True)
        ]
        self._buffer = new_buffer(KV_FRAME_MAX_BYTES)
        self._held: Manifest | None = None  # what `have` told of
        self._begun = False
        self._keep = 0
        self._tokens = bytearray()
        self._starts: tuple[int, ...] = ()
        self._lows: tuple[int, ...] = ()
        self._digests: list[list[bytes]] = []  # per cache, from the group of `lo` on
        self._reached = 0  # rows of [0, reached) are held and verified, in every cache
        self._parts: list[_Part] = []
        self._blobs: list[BlobManifest] = []
        self._done = self._closed = False

    @property
    def evicted(self) -> tuple[str, ...]:
        return self._claim.evicted

    @property
    def keep(self) -> int:
        return self._keep

    # -- before the rows

    def have(self) -> Have:
        """What the sender need not send again."""
        best = Have()
        for manifest in self._store.held(self._claim):
            have = self._have_of(manifest)
            if self._held is None or (have.lineage, have.n) > (best.lineage, best.n):
                self._held, best = manifest, have
        return best

    def _have_of(self, held: Manifest) -> Have:
        marks = (
            mark.keep
            for mark in self._offer.known
            if (mark.generation, mark.source) == (held.generation, held.source)
        )
        sure = max(marks, default=0)
        common = common_prefix(self._offer.prefix, held.tokens)
        tail = held.tokens[common * TOKEN_BYTES : (common + KV_PREFIX_TOKENS) * TOKEN_BYTES]
        one = len(held.caches) == 1
        n = min(sure, held.n_tokens) if sure > 0 else held.n_tokens if one else 0
        # Fewer tokens of this line may be sure than agree: the sender keeps what both allow.
        return Have(
            n=n,
            lineage=sure > 0,
            lows=tuple(min(cache.lo, n) for cache in held.caches) if n else (),
            common=min(common, n),
            tail=tail if n else b"",
            digests=held.caches[0].digests if one and n and not sure else b"",
            blobs=tuple(blob.facts for blob in held.blobs if blob.facts.n_tokens <= n) if sure else (),
        )

    def begin(self, keep: int) -> None:
        """The sender keeps [0, keep). Rows from there on may be overwritten from now on."""
        held = self._held if keep else None
        if keep and (held is None or keep > min(held.n_tokens, self._offer.n_tokens)):
            raise ChannelError("protocol", f"{keep} rows to keep, fewer are held")
        self._keep, self._begun = keep, True
        taken = starts_of(self._offer, keep, tuple(cache.lo for cache in held.caches) if held else ())
        self._starts, self._lows = tuple(t[0] for t in taken), tuple(t[1] for t in taken)
        self._tokens += held.tokens[: keep * TOKEN_BYTES] if held else b""
        for at in range(len(self._rows)):
            self._digests.append(self._kept_digests(at, held.caches[at] if held else None))
        self._blobs = [blob for blob in held.blobs if blob.facts.n_tokens <= keep] if held else []
        self._protect()
        self._reached = keep

    def _kept_digests(self, at: int, held: CacheManifest | None) -> list[bytes]:
        """Digests of the groups before the one of the first row that comes; of all when none comes."""
        row_file, start, low, n = self._rows[at], self._starts[at], self._lows[at], self._offer.n_tokens
        front = start // row_file.group - low // row_file.group
        old = held.digests if held is not None and held.lo == low else b""
        kept = [old[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i in range(front)]
        if start >= n and n % row_file.group:
            kept.append(row_file.digest(max(low, n // row_file.group * row_file.group), n, self._buffer))
        return kept

    def _protect(self) -> None:
        """Before rows are overwritten, nothing on disk may claim them."""
        manifest = self._store.replica(self._claim)
        if manifest is not None and manifest.n_tokens > self._keep:
            cut = self._cut(manifest, self._keep)
            blobs = (*self._blobs, *(cut.blobs if cut is not None else ()))
            self._store.truncated(self._claim, cut, blobs)
        self._store.forget_unfinished(self._claim)

    def _cut(self, manifest: Manifest, n: int) -> Manifest | None:
        """The manifest of the first n tokens; None when there is nothing left."""
        if n == 0 or any(cache.lo >= n for cache in manifest.caches):
            return None
        caches = []
        for row_file, cache in zip(self._rows, manifest.caches, strict=True):
            first = cache.lo // row_file.group
            whole = (n // row_file.group - first) * DIGEST_BYTES
            digests = cache.digests[: max(0, whole)]
            if n % row_file.group:
                lo = max(cache.lo, n // row_file.group * row_file.group)
                digests += row_file.digest(lo, n, self._buffer)
            # What an engine would have saved of a window at n tokens is not known: all of it, to be safe.
            caches.append(CacheManifest(lo=cache.lo, needed=0, digests=digests))
        return msgspec.structs.replace(
            manifest,
            tokens=manifest.tokens[: n * TOKEN_BYTES],
            caches=tuple(caches),
            blobs=tuple(blob for blob in manifest.blobs if blob.facts.n_tokens <= n),
        )

    @property
    def starts(self) -> tuple[int, ...]:
        return self._starts

    def tokens_done(self) -> None:
        """All tokens are here: they must be the offered ones before a row is taken."""
        if blake3(self._tokens).digest() != self._offer.tokens_digest:
            raise ChannelError("corrupt", "the tokens are not those of the offer")

    # -- rows and blobs

    def write(self, piece: Piece, payload: memoryview, digest: bytes) -> None:
        """One verified piece, in the order of the plan; `digest` is BLAKE3 of the payload."""
        if piece.type is FrameType.TOKENS:
            self._tokens += payload
        elif piece.type is FrameType.BLOB:
            part = self._parts[-1]
            with file_errors():
                pwrite_all(part.fd, payload, piece.offset)
            part.hash.update(payload)
            part.digest = part.hash.digest()
        else:
            row_file = self._rows[piece.segment]
            row_file.write(piece.offset, piece.rows, payload)
            lo = max(self._lows[piece.segment], piece.offset // row_file.group * row_file.group)
            if lo == piece.offset:
                self._digests[piece.segment].append(digest[:DIGEST_BYTES])
            else:  # the first piece completes a group that is held in part
                end = piece.offset + piece.rows
                self._digests[piece.segment].append(row_file.digest(lo, end, self._buffer))
            if piece.segment == 0:
                self._reached = piece.offset + piece.rows

    def begin_blob(self, facts: BlobFacts) -> None:
        self._parts.append(_Part(facts, self._store.create_part(self._claim, facts), blake3()))

    # -- the end

    def check(self, commit: Commit) -> None:
        """Compare with what the sender read; what does not agree spoils all that is held."""
        if tuple(part.digest for part in self._parts) != commit.blobs:
            raise ChannelError("corrupt", "a blob is not what the sender read")
        if len(commit.groups) != len(self._rows):
            raise ChannelError("protocol", "digests of other caches")
        for at, said in enumerate(commit.groups):
            if said != self._from_start(at):
                self._store.spoil(self._claim)
                self._reached = 0
                raise ChannelError("corrupt", "the rows here and the sender's are not the same")
        for part in self._parts:
            self._check_blob(part)

    def _from_start(self, at: int) -> bytes:
        """Digests from the group of the first row sent on, over what the sender has of each."""
        row_file, start, low = self._rows[at], self._starts[at], self._lows[at]
        group, n = row_file.group, self._offer.n_tokens
        if start >= n:
            return b""
        front = start // group - low // group
        own = self._digests[at][front:]
        first = max(self._offer.needed[at], start // group * group)
        if first != max(
            low, start // group * group
        ):  # the sender's file starts within this group, ours before
            own[0] = row_file.digest(first, min(n, (start // group + 1) * group), self._buffer)
        return b"".join(own)

    def _check_blob(self, part: _Part) -> None:
        facts, pread = part.facts, pread_of(part.fd)
        if facts.kind == "recurrent":
            if check_recurrent(self._offer.shape, pread, facts.size) != facts.n_tokens:
                raise ChannelError("corrupt", "the recurrent state is of another position")
            return
        check_checkpoint(
            self._offer.shape,
            pread,
            facts.size,
            bytes(self._tokens),
            facts.n_tokens,
            facts.pos_min,
            facts.pos_max,
        )

    def commit(self) -> tuple[Manifest, str]:
        """Make it a replica; also the name of the one it replaced, "" = none."""
        new = [BlobManifest(facts=part.facts, digest=part.digest) for part in self._parts]
        places = {(blob.facts.kind, blob.facts.n_tokens) for blob in new}
        blobs = [blob for blob in self._blobs if (blob.facts.kind, blob.facts.n_tokens) not in places] + new
        for part in self._parts:
            self._store.place_part(self._claim, part.facts)
        manifest = self._manifest(self._offer.n_tokens, _newest(blobs))

        def cut_rows() -> None:
            for row_file in self._rows:
                row_file.cut(self._offer.n_tokens)

        replaced = self._store.committed(self._claim, manifest, cut_rows)
        self._done = True
        return manifest, replaced

    def _manifest(self, n: int, blobs: tuple[BlobManifest, ...]) -> Manifest:
        offer = self._offer
        caches = []
        for at, row_file in enumerate(self._rows):
            count = max(0, groups_of(n, row_file.group) - self._lows[at] // row_file.group)
            digests = b"".join(self._digests[at][:count])
            caches.append(CacheManifest(lo=self._lows[at], needed=offer.needed[at], digests=digests))
        return Manifest(
            session=offer.session,
            model_fp=offer.model_fp,
            shape=offer.shape,
            generation=offer.generation,
            source=offer.source,
            created_unix_s=offer.created_unix_s,
            tokens=bytes(self._tokens[: n * TOKEN_BYTES]),
            caches=tuple(caches),
            blobs=blobs,
        )

    def close(self) -> None:
        """Give everything back; of a transfer that broke, the verified rows stay."""
        if self._closed:
            return
        self._closed = True
        for part in self._parts:
            os.close(part.fd)
        try:
            if self._begun and not self._done and self._worth_keeping():
                self._store.journal(self._claim, self._manifest(self._reached, tuple(self._blobs)))
        except KvError:
            self._store.forget_unfinished(self._claim)  # no room even for that
        finally:
            self._store.release(self._claim)

    def _worth_keeping(self) -> bool:
        # A window is taken whole, so only what of it lies below the base cache's rows counts.
        return (
            self._reached > self._keep
            and self._reached > 0
            and all(low < self._reached for low in self._lows)
        )


def _newest(blobs: list[BlobManifest]) -> tuple[BlobManifest, ...]:
    found: list[BlobManifest] = []
    for kind, most in (("recurrent", KV_RECURRENT_KEPT), ("checkpoint", KV_CHECKPOINTS_KEPT)):
        of_kind = sorted((b for b in blobs if b.facts.kind == kind), key=lambda b: b.facts.n_tokens)
        found += of_kind[-most:]
    return tuple(found)
