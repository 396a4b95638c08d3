"""Where a part of a buffer lies in it; Python itself does not tell."""

from libc.stdint cimport uint8_t, uintptr_t


def offset_in(const uint8_t[::1] whole not None, const uint8_t[::1] part not None) -> int:
    """Index in `whole` at which `part` begins, a view of it; -1 when it is no view of `whole`.

    Borrows both for the call only.
    """
    if whole.shape[0] == 0 or part.shape[0] == 0:
        return -1
    cdef uintptr_t begin = <uintptr_t>&whole[0]
    cdef uintptr_t at = <uintptr_t>&part[0]
    cdef size_t size = <size_t>whole.shape[0]
    cdef size_t length = <size_t>part.shape[0]
    if at < begin or at - begin > size or length > size - (at - begin):
        return -1
    return <Py_ssize_t>(at - begin)
