/* Rows of a save-file and of a replica: gathered, scattered, transposed, split into byte planes.
 *
 * Error contract of the moves: 0 when all bytes moved, else a negative errno value. The kernels in memory
 * cannot fail: their callers have compared every size first. No Python in here; callers hold no GIL. */
#ifndef VW_ROWS_H
#define VW_ROWS_H

#include "vw_io.h"

/* The ranges one after the other into `into`, which holds all of them. */
static inline int vw_gather(int fd, const struct vw_range *ranges, size_t n, uint8_t *into, size_t *done)
{
    size_t i = 0, moved;
    *done = 0;
    while (i < n) {
        struct vw_range range;
        int err;
        i += vw_joined(ranges, n, i, &range);
        err = vw_pread_exact(fd, into + *done, range.size, range.offset, &moved);
        *done += moved;
        if (err)
            return err;
    }
    return 0;
}

static inline int vw_scatter(int fd, const uint8_t *from, const struct vw_range *ranges, size_t n, size_t *done)
{
    size_t i = 0, moved;
    *done = 0;
    while (i < n) {
        struct vw_range range;
        int err;
        i += vw_joined(ranges, n, i, &range);
        err = vw_pwrite_all(fd, from + *done, range.size, range.offset, &moved);
        *done += moved;
        if (err)
            return err;
    }
    return 0;
}

/* Strips at offset, offset + stride ...: dense ones are one move. The caller has checked that none ends
 * beyond INT64_MAX. */
static inline int vw_gather_strips(int fd, int64_t offset, int64_t stride, size_t strip, size_t n, uint8_t *into,
                                   size_t *done)
{
    size_t i, moved;
    *done = 0;
    if (stride == (int64_t)strip)
        return vw_pread_exact(fd, into, strip * n, offset, done);
    for (i = 0; i < n; i++) {
        int err = vw_pread_exact(fd, into + *done, strip, offset + (int64_t)i * stride, &moved);
        *done += moved;
        if (err)
            return err;
    }
    return 0;
}

static inline int vw_scatter_strips(int fd, const uint8_t *from, int64_t offset, int64_t stride, size_t strip,
                                    size_t n, size_t *done)
{
    size_t i, moved;
    *done = 0;
    if (stride == (int64_t)strip)
        return vw_pwrite_all(fd, from, strip * n, offset, done);
    for (i = 0; i < n; i++) {
        int err = vw_pwrite_all(fd, from + *done, strip, offset + (int64_t)i * stride, &moved);
        *done += moved;
        if (err)
            return err;
    }
    return 0;
}

/* Bytes a matrix spans: (rows - 1) * stride + row_bytes. -EOVERFLOW when that is not a size. */
static inline int vw_span(size_t rows, size_t row_bytes, size_t stride, size_t *span)
{
    *span = 0;
    if (rows == 0 || row_bytes == 0)
        return 0;
    if (__builtin_mul_overflow(rows - 1, stride, span) || __builtin_add_overflow(*span, row_bytes, span))
        return -EOVERFLOW;
    return 0;
}

/* One tile is read by rows and written by rows; in between it lies in the first-level cache. Strides need
 * not be multiples of the element, so elements are moved by memcpy, which is one load or store. */
#define VW_TILE ((size_t)64)

#define VW_TRANSPOSE(name, elem)                                                                                  \
    static inline void name(const uint8_t *src, size_t src_stride, size_t rows, size_t columns, uint8_t *dst,     \
                            size_t dst_stride)                                                                    \
    {                                                                                                             \
        elem tile[VW_TILE][VW_TILE];                                                                              \
        size_t r0, c0, r, c;                                                                                      \
        for (r0 = 0; r0 < rows; r0 += VW_TILE) {                                                                  \
            size_t nr = rows - r0 < VW_TILE ? rows - r0 : VW_TILE;                                                \
            for (c0 = 0; c0 < columns; c0 += VW_TILE) {                                                           \
                size_t nc = columns - c0 < VW_TILE ? columns - c0 : VW_TILE;                                      \
                for (r = 0; r < nr; r++)                                                                          \
                    memcpy(tile[r], src + (r0 + r) * src_stride + c0 * sizeof(elem), nc * sizeof(elem));          \
                for (c = 0; c < nc; c++) {                                                                        \
                    elem line[VW_TILE];                                                                           \
                    for (r = 0; r < nr; r++)                                                                      \
                        line[r] = tile[r][c];                                                                     \
                    memcpy(dst + (c0 + c) * dst_stride + r0 * sizeof(elem), line, nr * sizeof(elem));             \
                }                                                                                                 \
            }                                                                                                     \
        }                                                                                                         \
    }

VW_TRANSPOSE(vw_transpose_1, uint8_t)
VW_TRANSPOSE(vw_transpose_2, uint16_t)
VW_TRANSPOSE(vw_transpose_4, uint32_t)

/* Byte planes: plain loops over restrict pointers, which the compiler turns into shuffles. */
static inline void vw_split_2(const uint8_t *restrict src, uint8_t *restrict dst, size_t n)
{
    uint8_t *restrict d0 = dst, *restrict d1 = dst + n;
    size_t i;
    for (i = 0; i < n; i++) {
        d0[i] = src[2 * i];
        d1[i] = src[2 * i + 1];
    }
}

static inline void vw_split_4(const uint8_t *restrict src, uint8_t *restrict dst, size_t n)
{
    uint8_t *restrict d0 = dst, *restrict d1 = dst + n, *restrict d2 = dst + 2 * n, *restrict d3 = dst + 3 * n;
    size_t i;
    for (i = 0; i < n; i++) {
        d0[i] = src[4 * i];
        d1[i] = src[4 * i + 1];
        d2[i] = src[4 * i + 2];
        d3[i] = src[4 * i + 3];
    }
}

static inline void vw_merge_2(const uint8_t *restrict src, uint8_t *restrict dst, size_t n)
{
    const uint8_t *restrict s0 = src, *restrict s1 = src + n;
    size_t i;
    for (i = 0; i < n; i++) {
        dst[2 * i] = s0[i];
        dst[2 * i + 1] = s1[i];
    }
}

static inline void vw_merge_4(const uint8_t *restrict src, uint8_t *restrict dst, size_t n)
{
    const uint8_t *restrict s0 = src, *restrict s1 = src + n, *restrict s2 = src + 2 * n, *restrict s3 = src + 3 * n;
    size_t i;
    for (i = 0; i < n; i++) {
        dst[4 * i] = s0[i];
        dst[4 * i + 1] = s1[i];
        dst[4 * i + 2] = s2[i];
        dst[4 * i + 3] = s3[i];
    }
}

#endif
