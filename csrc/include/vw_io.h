/* Whole-buffer moves over descriptors: each call finishes its buffer, fails, or runs out of time.
 *
 * Error contract of every function: 0 when all bytes moved, else a negative errno value. *done always
 * says how many bytes moved. EINTR never surfaces. No Python in here; callers hold no GIL. */
#ifndef VW_IO_H
#define VW_IO_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/sendfile.h>
#endif
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* Python ignores SIGPIPE anyway */
#endif
#ifndef ENODATA
#define ENODATA EIO
#endif

static inline int64_t vw_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Waits until fd is ready for `events`, at most silence_ms and never past deadline_ms (monotonic; <0 = none). */
static inline int vw_wait(int fd, short events, int silence_ms, int64_t deadline_ms)
{
    int64_t until = vw_now_ms() + silence_ms;
    if (deadline_ms >= 0 && deadline_ms < until)
        until = deadline_ms;
    for (;;) {
        int64_t left = until - vw_now_ms();
        struct pollfd p = {.fd = fd, .events = events, .revents = 0};
        int n;
        if (left < 0)
            left = 0;
        n = poll(&p, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (n > 0)
            return (p.revents & POLLNVAL) ? -EBADF : 0; /* errors and hang-ups show in the call that follows */
        if (n == 0)
            return -ETIMEDOUT;
        if (errno != EINTR)
            return -errno;
    }
}

/* A peer that takes one byte now and then never falls silent: the deadline is checked on progress too. */
static inline int vw_late(int64_t deadline_ms)
{
    return deadline_ms >= 0 && vw_now_ms() >= deadline_ms;
}

/* Sends up to three pieces as one stream of bytes. */
static inline int vw_send_all(int fd, const struct iovec *pieces, size_t n_pieces, int silence_ms,
                              int64_t deadline_ms, size_t *done)
{
    struct iovec iov[3];
    size_t first = 0;
    *done = 0;
    if (n_pieces > 3)
        return -EINVAL;
    memcpy(iov, pieces, n_pieces * sizeof *pieces);
    for (;;) {
        struct msghdr m;
        ssize_t n;
        while (first < n_pieces && iov[first].iov_len == 0)
            first++;
        if (first == n_pieces)
            return 0;
        memset(&m, 0, sizeof m);
        m.msg_iov = iov + first;
        m.msg_iovlen = n_pieces - first;
        n = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0) {
            int err = errno;
            if (err == EINTR)
                continue;
            if (err != EAGAIN && err != EWOULDBLOCK)
                return -err;
            err = vw_wait(fd, POLLOUT, silence_ms, deadline_ms);
            if (err)
                return err;
            continue;
        }
        *done += (size_t)n;
        while (n > 0) {
            size_t part = (size_t)n < iov[first].iov_len ? (size_t)n : iov[first].iov_len;
            iov[first].iov_base = (char *)iov[first].iov_base + part;
            iov[first].iov_len -= part;
            n -= (ssize_t)part;
            if (iov[first].iov_len == 0)
                first++;
        }
        if (first < n_pieces && vw_late(deadline_ms))
            return -ETIMEDOUT;
    }
}

/* A receiver that is woken for every segment spends its time waking: ask for this much at a time. */
#define VW_WAKE_BYTES ((size_t)256 * 1024)
#define VW_WAKE_MS 20 /* a link that does not bring VW_WAKE_BYTES in this time is read as it trickles */

static inline void vw_wake_at(int fd, size_t bytes)
{
    int value = (int)bytes;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value); /* only ever saves wake-ups */
}

/* Waits until `left` bytes, or many, or at least some after VW_WAKE_MS, are there; errors as vw_wait. */
static inline int vw_wait_bytes(int fd, size_t left, int silence_ms, int64_t deadline_ms)
{
    if (silence_ms > VW_WAKE_MS && left > 1) {
        int err;
        vw_wake_at(fd, left < VW_WAKE_BYTES ? left : VW_WAKE_BYTES);
        err = vw_wait(fd, POLLIN, VW_WAKE_MS, deadline_ms);
        vw_wake_at(fd, 1);
        if (err != -ETIMEDOUT)
            return err;
    }
    return vw_wait(fd, POLLIN, silence_ms, deadline_ms);
}

/* Fills the buffer from a socket; the peer closing early is -ECONNRESET. */
static inline int vw_recv_exact(int fd, uint8_t *into, size_t size, int silence_ms, int64_t deadline_ms,
                                size_t *done)
{
    *done = 0;
    while (*done < size) {
        ssize_t n = recv(fd, into + *done, size - *done, MSG_DONTWAIT);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0) {
            int err = errno;
            if (err == EINTR)
                continue;
            if (err != EAGAIN && err != EWOULDBLOCK)
                return -err;
            err = vw_wait_bytes(fd, size - *done, silence_ms, deadline_ms);
            if (err)
                return err;
            continue;
        }
        *done += (size_t)n;
        if (*done < size && vw_late(deadline_ms))
            return -ETIMEDOUT;
    }
    return 0;
}

/* Fills the buffer from a file; the file ending early is -ENODATA. */
static inline int vw_pread_exact(int fd, uint8_t *into, size_t size, int64_t offset, size_t *done)
{
    *done = 0;
    while (*done < size) {
        ssize_t n = pread(fd, into + *done, size - *done, (off_t)(offset + (int64_t)*done));
        if (n == 0)
            return -ENODATA;
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return -errno;
        }
        *done += (size_t)n;
    }
    return 0;
}

/* Writes all of the buffer; a file that takes nothing is -EIO. */
static inline int vw_pwrite_all(int fd, const uint8_t *from, size_t size, int64_t offset, size_t *done)
{
    *done = 0;
    while (*done < size) {
        ssize_t n = pwrite(fd, from + *done, size - *done, (off_t)(offset + (int64_t)*done));
        if (n == 0)
            return -EIO;
        if (n < 0) {
            if (errno == EINTR)
                continue;
            return -errno;
        }
        *done += (size_t)n;
    }
    return 0;
}

/* A part of a file. */
struct vw_range {
    int64_t offset;
    size_t size;
};

/* How many of the ranges from `first` on follow each other in the file, as one range. */
static inline size_t vw_joined(const struct vw_range *ranges, size_t n, size_t first, struct vw_range *joined)
{
    size_t next = first + 1;
    *joined = ranges[first];
    while (next < n && ranges[next].offset == joined->offset + (int64_t)joined->size)
        joined->size += ranges[next++].size;
    return next - first;
}

/* Below this a range is cheaper to copy together with its neighbours than to send by itself. */
#define VW_SENDFILE_BYTES ((size_t)32 * 1024)

/* Sends a part of a file from the page cache; fd does not block. -EOPNOTSUPP before the first byte: cannot. */
static inline int vw_send_file(int fd, int file_fd, struct vw_range range, int silence_ms, int64_t deadline_ms,
                               size_t *done)
{
    *done = 0;
#ifdef __linux__
    while (*done < range.size) {
        off_t at = (off_t)(range.offset + (int64_t)*done);
        ssize_t n = sendfile(fd, file_fd, &at, range.size - *done);
        if (n == 0)
            return -ENODATA;
        if (n < 0) {
            int err = errno;
            if (err == EINTR)
                continue;
            if ((err == EINVAL || err == ENOSYS) && *done == 0)
                return -EOPNOTSUPP;
            if (err != EAGAIN && err != EWOULDBLOCK)
                return -err;
            err = vw_wait(fd, POLLOUT, silence_ms, deadline_ms);
            if (err)
                return err;
            continue;
        }
        *done += (size_t)n;
        if (*done < range.size && vw_late(deadline_ms))
            return -ETIMEDOUT;
    }
    return 0;
#else
    (void)fd, (void)file_fd, (void)range, (void)silence_ms, (void)deadline_ms;
    return -EOPNOTSUPP;
#endif
}

/* Sends head, the ranges and tail as one stream of bytes. `scratch` holds VW_SENDFILE_BYTES. */
static inline int vw_send_ranges(int fd, struct iovec head, int file_fd, const struct vw_range *ranges,
                                 size_t n_ranges, struct iovec tail, uint8_t *scratch, int silence_ms,
                                 int64_t deadline_ms, size_t *done)
{
    /* What waits to be sent by copy: the head, then what was gathered since the last long range. */
    struct iovec pieces[3] = {head, {scratch, 0}, {NULL, 0}};
    size_t i = 0, moved;
    int err, flags = fcntl(fd, F_GETFL);
    *done = 0;
    if (flags < 0 || (!(flags & O_NONBLOCK) && fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0))
        return -errno;
    while (i < n_ranges) {
        struct vw_range range;
        i += vw_joined(ranges, n_ranges, i, &range);
        if (range.size >= VW_SENDFILE_BYTES) {
            err = vw_send_all(fd, pieces, 2, silence_ms, deadline_ms, &moved);
            *done += moved;
            if (err)
                return err;
            pieces[0].iov_len = pieces[1].iov_len = 0;
            err = vw_send_file(fd, file_fd, range, silence_ms, deadline_ms, &moved);
            *done += moved;
            if (err == 0)
                continue;
            if (err != -EOPNOTSUPP)
                return err;
        }
        while (range.size) {
            size_t room = VW_SENDFILE_BYTES - pieces[1].iov_len;
            size_t part = range.size < room ? range.size : room;
            err = vw_pread_exact(file_fd, scratch + pieces[1].iov_len, part, range.offset, &moved);
            if (err)
                return err;
            pieces[1].iov_len += part;
            range.offset += (int64_t)part;
            range.size -= part;
            if (pieces[1].iov_len < VW_SENDFILE_BYTES)
                continue;
            err = vw_send_all(fd, pieces, 2, silence_ms, deadline_ms, &moved);
            *done += moved;
            if (err)
                return err;
            pieces[0].iov_len = pieces[1].iov_len = 0;
        }
    }
    pieces[2] = tail;
    err = vw_send_all(fd, pieces, 3, silence_ms, deadline_ms, &moved);
    *done += moved;
    return err;
}

#endif
