"""Reads HTTP/1.x answers of one connection: heads, and bodies freed of their framing.

Strict: what two readers could take for different things is a fault, never a guess.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

cdef enum State:
    HEAD
    LENGTH  # a body of a known length
    UNTIL_CLOSE  # a body that ends with the connection
    SIZE_FIRST  # of a chunk
    SIZE
    EXTENSION
    SIZE_LF
    DATA
    DATA_CR
    DATA_LF
    TRAILER_START
    TRAILER
    TRAILER_LF
    LAST_LF
    DONE
    FAULTY

cdef uint64_t SIZE_MAX_BYTES = <uint64_t>1 << 60  # no sum of sizes below it overflows


cdef inline bint is_token_char(uint8_t c) noexcept nogil:
    if c >= 0x7F or c <= 0x20:
        return False
    return c not in (0x22, 0x28, 0x29, 0x2C, 0x2F, 0x3A, 0x3B, 0x3C, 0x3D, 0x3E, 0x3F, 0x40, 0x5B, 0x5C,
                     0x5D, 0x7B, 0x7D)


cdef inline int hex_digit(uint8_t c) noexcept nogil:
    """Value of a digit, -1 for anything else."""
    if 0x30 <= c <= 0x39:
        return c - 0x30
    if 0x41 <= c <= 0x46:
        return c - 0x41 + 10
    if 0x61 <= c <= 0x66:
        return c - 0x61 + 10
    return -1


cdef bint is_token(bytes text) noexcept:
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(text)
    cdef Py_ssize_t i, n = len(text)
    for i in range(n):
        if not is_token_char(p[i]):
            return False
    return n > 0


cdef bint is_value(bytes text) noexcept:
    cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(text)
    cdef Py_ssize_t i, n = len(text)
    for i in range(n):
        if (p[i] < 0x20 and p[i] != 0x09) or p[i] == 0x7F:
            return False
    return True


cdef class AnswerReader:
    """One answer after the other: `start`, then `feed` until `done`.

    A fault is told in `fault` and stays until the connection is given up; what was fed before it is
    still good. The facts of a head count from `head_seen` on.
    """

    cdef readonly bint head_seen
    cdef readonly bint keep_alive  # the other side takes another request on this connection
    cdef readonly bint chunked
    cdef readonly bint surplus  # bytes came that belong to no answer
    cdef readonly int status
    cdef readonly bytes reason
    cdef readonly tuple headers  # (name, value), as they came
    cdef readonly str fault

    cdef State _state
    cdef bint _http10
    cdef uint64_t _left  # bytes of the body or of the chunk
    cdef Py_ssize_t _spent  # bytes of a chunk's extension or of the trailer
    cdef bytes _carry  # a head whose end has not come
    cdef Py_ssize_t _head_max_bytes
    cdef Py_ssize_t _headers_max

    def __init__(self, Py_ssize_t head_max_bytes, Py_ssize_t headers_max) -> None:
        self._head_max_bytes = head_max_bytes
        self._headers_max = headers_max
        self.fault = ""
        self.start()

    @property
    def done(self) -> bool:
        """Whether the answer came to its end."""
        return self._state == DONE

    def start(self) -> None:
        """Expect a new answer."""
        self.head_seen = False
        self.status = 0
        self._carry = b""
        if self._state != FAULTY:
            self._state = HEAD

    def feed(self, bytes data not None) -> bytes:
        """Take what the connection gave; answers with the bytes of the body in it."""
        cdef Py_ssize_t at = 0
        while self._state == HEAD:
            if self._carry:
                at = max(len(self._carry) - 3, 0)
                data = self._carry + data
                self._carry = b""
            end = data.find(b"\r\n\r\n", at)
            if (end if end >= 0 else len(data)) > self._head_max_bytes:
                return self._fail("its head is too large")
            if end < 0:
                self._carry = data
                return b""
            at = end + 4
            self._read_head(data[:end])
            if self._state == HEAD:  # an interim answer came first
                data, at = data[at:], 0
        return self._read_body(data, at)

    def feed_eof(self) -> bool:
        """Take the end of the connection; answers whether the answer is whole."""
        if self._state == UNTIL_CLOSE:
            self._state = DONE
        return self._state == DONE

    cdef bytes _fail(self, str why):
        self._state = FAULTY
        self.fault = why
        return b""

    cdef int _read_head(self, bytes head) except -1:
        cdef list lines = head.split(b"\r\n")
        cdef bytes first = lines[0]
        cdef bytes line, name, value, low
        cdef bytes length = None
        cdef bytes coding = None
        cdef bytes options = b""
        cdef list headers = []
        cdef Py_ssize_t i, colon
        if (len(first) < 12 or not (first.startswith(b"HTTP/1.1 ") or first.startswith(b"HTTP/1.0 "))
                or not first[9:12].isdigit() or first[9] == 0x30 or (len(first) > 12 and first[12] != 0x20)
                or not is_value(first)):
            self._fail("it does not begin with a status line")
            return 0
        if len(lines) - 1 > self._headers_max:
            self._fail("it has too many headers")
            return 0
        for i in range(1, len(lines)):
            line = lines[i]
            colon = line.find(b":")
            if colon <= 0:
                self._fail("a header has no name")
                return 0
            name = line[:colon]
            value = line[colon + 1:].strip(b" \t")
            if not is_token(name) or not is_value(value):
                self._fail("a header has characters that are not allowed")
                return 0
            headers.append((name, value))
            if len(name) in (10, 14, 17):  # the only lengths of those that matter here
                low = name.lower()
                if low == b"connection":
                    options += b"," + value
                elif low == b"content-length":
                    if length is not None:
                        self._fail("it names its length twice")
                        return 0
                    length = value
                elif low == b"transfer-encoding":
                    if coding is not None:
                        self._fail("it names its framing twice")
                        return 0
                    coding = value
        self.status = int(first[9:12])
        self.reason = first[13:]
        self.headers = tuple(headers)
        self._http10 = first[7] == 0x30
        return self._frame(length, coding, options)

    cdef int _frame(self, bytes length, bytes coding, bytes options) except -1:
        """Decide how the body ends."""
        self.chunked = coding is not None
        if self.chunked and (coding.lower() != b"chunked" or length is not None):
            self._fail("its framing is ambiguous")
            return 0
        if length is not None and (not length.isdigit() or len(length) > 18):
            self._fail("its length is no number")
            return 0
        self.keep_alive = not self._http10
        if options:
            named = [option.strip(b" \t") for option in options.lower().split(b",")]
            self.keep_alive = b"keep-alive" in named if self._http10 else b"close" not in named
        if self.status < 200 and self.status != 101:
            return 0  # interim; the answer is still to come
        self.head_seen = True
        if self.status in (101, 204, 304):
            self._state = DONE
        elif self.chunked:
            self._state = SIZE_FIRST
        elif length is None:
            self._state = UNTIL_CLOSE
            self.keep_alive = False
        else:
            self._left = int(length)
            self._state = LENGTH if self._left else DONE
        return 0

    cdef bytes _read_body(self, bytes data, Py_ssize_t at):
        cdef Py_ssize_t n = len(data) - at
        if n == 0:
            return b""
        if self._state == LENGTH:
            if <uint64_t>n >= self._left:
                self.surplus = self.surplus or <uint64_t>n > self._left
                n = <Py_ssize_t>self._left
                self._state = DONE
            self._left -= <uint64_t>n
            return data if n == len(data) else data[at:at + n]
        if self._state == UNTIL_CLOSE:
            return data[at:]
        if self._state == DONE or self._state == HEAD:
            self.surplus = True
            return b""
        if self._state == FAULTY:
            return b""
        return self._read_chunks(data, at)

    cdef bytes _read_chunks(self, bytes data, Py_ssize_t at):
        cdef Py_ssize_t n_out = 0
        cdef Py_ssize_t size = len(data) - at
        cdef const uint8_t *p = <const uint8_t *>PyBytes_AS_STRING(data)
        cdef uint8_t *out = <uint8_t *>PyMem_Malloc(<size_t>size)
        if out is NULL:
            raise MemoryError()
        try:
            n_out = self._unframe(p + at, size, out)
            if self._state == FAULTY:
                self.fault = "its chunks are not framed as HTTP demands"
            return PyBytes_FromStringAndSize(<char *>out, n_out)
        finally:
            PyMem_Free(out)

    cdef Py_ssize_t _unframe(self, const uint8_t *p, Py_ssize_t size, uint8_t *out) noexcept nogil:
        """Copy what is no framing from `p` to `out`, at most `size` bytes; answers with how many."""
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t n_out = 0
        cdef Py_ssize_t n
        cdef int digit
        cdef uint8_t c
        while i < size:
            if self._state == DATA:
                n = size - i
                if <uint64_t>n > self._left:
                    n = <Py_ssize_t>self._left
                memcpy(out + n_out, p + i, <size_t>n)
                n_out += n
                i += n
                self._left -= <uint64_t>n
                if self._left == 0:
                    self._state = DATA_CR
                continue
            c = p[i]
            i += 1
            if self._state == SIZE_FIRST or self._state == SIZE:
                digit = hex_digit(c)
                if digit >= 0:
                    self._left = digit if self._state == SIZE_FIRST else self._left * 16 + <uint64_t>digit
                    self._state = SIZE if self._left < SIZE_MAX_BYTES else FAULTY
                elif self._state == SIZE_FIRST:
                    self._state = FAULTY
                elif c == 0x0D:
                    self._state = SIZE_LF
                elif c == 0x3B or c == 0x20 or c == 0x09:
                    self._spent = 0
                    self._state = EXTENSION
                else:
                    self._state = FAULTY
            elif self._state == EXTENSION:
                self._spent += 1
                if c == 0x0D:
                    self._state = SIZE_LF
                elif c == 0x0A or self._spent > self._head_max_bytes:
                    self._state = FAULTY
            elif self._state == SIZE_LF:
                self._spent = 0
                self._state = FAULTY if c != 0x0A else DATA if self._left else TRAILER_START
            elif self._state == DATA_CR:
                self._state = DATA_LF if c == 0x0D else FAULTY
            elif self._state == DATA_LF:
                self._state = SIZE_FIRST if c == 0x0A else FAULTY
            elif self._state == TRAILER_START or self._state == TRAILER:
                self._spent += 1
                if c == 0x0D:
                    self._state = LAST_LF if self._state == TRAILER_START else TRAILER_LF
                elif c == 0x0A or self._spent > self._head_max_bytes:
                    self._state = FAULTY
                else:
                    self._state = TRAILER
            elif self._state == TRAILER_LF:
                self._state = TRAILER_START if c == 0x0A else FAULTY
            elif self._state == LAST_LF:
                self._state = DONE if c == 0x0A else FAULTY
            elif self._state == DONE:
                self.surplus = True
                break
            else:
                break
        return n_out
