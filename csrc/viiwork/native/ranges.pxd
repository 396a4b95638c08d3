"""Python's (offset, size) pairs as a C array."""

from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

cdef extern from "vw_io.h" nogil:
    struct vw_range:
        int64_t offset
        size_t size


cdef inline vw_range *ranges_of(object pairs, size_t *n, size_t *total) except NULL:
    """The pairs, their count and the sum of their sizes; the caller frees the array.

    Raises ValueError for an offset or size below zero or a range whose end is beyond what a file can hold.
    """
    cdef list items = list(pairs)
    cdef size_t i = 0
    cdef int64_t offset, size
    cdef int64_t most = 0x7FFFFFFFFFFFFFFF
    cdef int64_t summed = 0
    n[0] = <size_t>len(items)
    cdef vw_range *ranges = <vw_range *>malloc((n[0] + 1) * sizeof(vw_range))
    if ranges == NULL:
        raise MemoryError(ENOMEM, "no memory for the ranges")
    try:
        for offset, size in items:
            if offset < 0 or size < 0 or size > most - offset or size > most - summed:
                raise ValueError(f"({offset}, {size}) is not a range of a file")
            ranges[i].offset = offset
            ranges[i].size = <size_t>size
            summed += size
            i += 1
    except BaseException:
        free(ranges)
        raise
    total[0] = <size_t>summed
    return ranges
