"""A save-file as the state it holds: its offer, and its rows in the order in which they travel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from blake3 import blake3

from viiwork.errors import KvError, SaveFileError
from viiwork.kv.buffers import new_buffer
from viiwork.kv.files import open_save, pread_of
from viiwork.kv.jobs import SaveFacts, StateFile
from viiwork.kv.link import file_errors
from viiwork.limits import KV_CHECKPOINTS_KEPT, KV_FRAME_MAX_BYTES
from viiwork.native.mover import pread_exact
from viiwork.native.rows import gather, gather_strips, transpose
from viiwork.wire.channel import FrameType
from viiwork.wire.groups import DIGEST_BYTES, Piece, rows_of_group
from viiwork.wire.replica import TOKEN_BYTES, BlobFacts, Mark, Offer, prefix_digests, wrong_shape
from viiwork.wire.rows import RowSpan, spans_of
from viiwork.wire.savefile import parse
from viiwork.wire.state import SaveInfo, segments_of


def facts_of(info: SaveInfo) -> SaveFacts:
    return SaveFacts(
        shape=info.shape,
        n_tokens=info.n_tokens,
        n_stream=info.n_stream,
        v_trans=info.v_trans,
        checkpoints=tuple(point.n_tokens for point in info.checkpoints),
        total_bytes=info.total_bytes,
    )


@contextmanager
def open_state(file: StateFile) -> Iterator[SavedState]:
    """The state in a save-file, checked; raises `KvError`."""
    with open_save(file.path, file.n_written) as (fd, size):
        info = parse(pread_of(fd), size, n_vocab=file.n_vocab)
        if file.n_saved and info.n_tokens != file.n_saved:
            raise SaveFileError("bad_file", f"{info.n_tokens} tokens, the engine saved {file.n_saved}")
        if wrong := wrong_shape(info.shape):
            raise SaveFileError("not_portable", f"the state's {wrong} is out of bounds")
        yield SavedState(fd, info, file)


class SavedState:
    """Borrows `fd`; one thread reads."""

    def __init__(self, fd: int, info: SaveInfo, file: StateFile) -> None:
        self.fd, self.info, self._file = fd, info, file
        self.tokens = pread_of(fd)(info.tokens_offset, TOKEN_BYTES * info.n_tokens)
        self._segments = [
            [segment for segment in segments_of(info.shape) if segment.cache == at]
            for at in range(len(info.caches))
        ]
        # Where every segment of a cache is one run of rows: (offset of position 0, row bytes) of each.
        self._plain = [self._plain_cache(at) for at in range(len(info.caches))]
        self._scratch = memoryview(bytearray(0))
        self.blobs, self._blob_at = self._blobs()

    def _plain_cache(self, at: int) -> list[tuple[int, int]] | None:
        found = []
        for segment in self._segments[at]:
            spans = spans_of(self.info, segment, 0, self.info.n_tokens)
            if len(spans) != 1 or not isinstance(spans[0], RowSpan):
                return None
            found.append((spans[0].offset - spans[0].pos * segment.row_bytes, segment.row_bytes))
        return found

    def _blobs(self) -> tuple[tuple[BlobFacts, ...], list[int]]:
        found: list[tuple[BlobFacts, int]] = []
        wanted = min(self._file.checkpoints, KV_CHECKPOINTS_KEPT)
        for point in self.info.checkpoints[-wanted:] if wanted > 0 else ():
            facts = BlobFacts(
                kind="checkpoint",
                n_tokens=point.n_tokens,
                size=point.size,
                pos_min=point.pos_min,
                pos_max=point.pos_max,
            )
            found.append((facts, point.offset))
        if (blob := self.info.recurrent) is not None:
            found.append((BlobFacts(kind="recurrent", n_tokens=blob.n_tokens, size=blob.size), blob.offset))
        return tuple(facts for facts, _ in found), [offset for _, offset in found]

    @property
    def needed(self) -> tuple[int, ...]:
        return tuple(rows.lo for rows in self.info.caches)

    def offer(self) -> Offer:
        file = self._file
        # Sent again, it is the same state.
        same = Mark(generation=file.generation, source=file.source, keep=self.info.n_tokens)
        return Offer(
            session=file.session,
            model_fp=file.model_fp,
            shape=self.info.shape,
            n_tokens=self.info.n_tokens,
            tokens_digest=self.info.tokens_digest,
            prefix=prefix_digests(self.tokens),
            needed=self.needed,
            blobs=self.blobs,
            known=(same, *file.known),
            generation=file.generation,
            source=file.source,
            created_unix_s=file.created_unix_s,
        )

    def read(self, piece: Piece, buffer: memoryview) -> memoryview:
        """The payload of a piece, in the front of `buffer`."""
        view = buffer[: piece.size]
        if piece.type is FrameType.TOKENS:
            view[:] = self.tokens[TOKEN_BYTES * piece.offset : TOKEN_BYTES * (piece.offset + piece.rows)]
        elif piece.type is FrameType.BLOB:
            with file_errors():
                pread_exact(self.fd, view, self._blob_at[piece.segment] + piece.offset)
        else:
            with file_errors():
                self._read_rows(piece, view)
        return view

    def ranges_of(self, piece: Piece) -> list[tuple[int, int]]:
        """The ranges of the file a piece consists of; none where it is not in the file in that order."""
        if piece.type is FrameType.TOKENS:
            return [(self.info.tokens_offset + TOKEN_BYTES * piece.offset, piece.size)]
        if piece.type is FrameType.BLOB:
            return [(self._blob_at[piece.segment] + piece.offset, piece.size)]
        plain = self._plain[piece.segment] or ()
        return [(base + piece.offset * width, piece.rows * width) for base, width in plain]

    def _read_rows(self, piece: Piece, view: memoryview) -> None:
        pos, rows = piece.offset, piece.rows
        plain = self._plain[piece.segment]
        if plain is not None:
            gather(self.fd, self.ranges_of(piece), view)
            return
        ranges: list[tuple[int, int]] = []
        begun = at = 0  # of the ranges not read yet, and of the next byte
        for segment in self._segments[piece.segment]:
            for span in spans_of(self.info, segment, pos, pos + rows):
                if isinstance(span, RowSpan):
                    ranges.append((span.offset, span.size))
                else:
                    if ranges:
                        gather(self.fd, ranges, view[begun:at])
                        ranges = []
                    self._read_strips(
                        span.offset, span.stride, span.n, span.n_channels, span.elem_bytes, view[at:]
                    )
                    begun = at + span.size
                at += span.size
        if ranges:
            gather(self.fd, ranges, view[begun:at])
        if at != piece.size:
            raise KvError("bad_file", "the save-file lacks rows")

    def _read_strips(
        self, offset: int, stride: int, n: int, n_channels: int, elem_bytes: int, into: memoryview
    ) -> None:
        if not len(self._scratch):
            self._scratch = new_buffer(KV_FRAME_MAX_BYTES)
        strips = self._scratch[: n * n_channels * elem_bytes]
        gather_strips(self.fd, offset, stride, n * elem_bytes, n_channels, strips)
        transpose(strips, n_channels, n, elem_bytes, into[: len(strips)])

    def same_rows(self, digests: bytes, held: int) -> int:
        """Leading rows whose digests are these: whole groups of the only cache."""
        if not digests or len(self.info.caches) != 1:
            return 0
        group = rows_of_group(self.info.shape.caches[0])
        buffer = new_buffer(KV_FRAME_MAX_BYTES)
        most = min(min(held, self.info.n_tokens) // group, len(digests) // DIGEST_BYTES)
        for index in range(most):
            view = self.read(self.whole_group(0, index), buffer)
            at = index * DIGEST_BYTES
            if blake3(view).digest(length=DIGEST_BYTES) != digests[at : at + DIGEST_BYTES]:
                return index * group
        return most * group

    def whole_group(self, cache: int, index: int) -> Piece:
        """The rows the file holds of one group."""
        group = rows_of_group(self.info.shape.caches[cache])
        first = max(index * group, self.needed[cache])
        rows = min((index + 1) * group, self.info.n_tokens) - first
        row_bytes = sum(segment.row_bytes for segment in self._segments[cache])
        return Piece(FrameType.ROWS, cache, first, rows, rows * row_bytes)
