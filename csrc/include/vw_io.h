/* Whole-buffer moves over descriptors: each call finishes its buffer, fails, or runs out of time.
 *
 * Error contract of every function: 0 when all bytes moved, else a negative errno value. *done always
 * says how many bytes moved. EINTR never surfaces. No Python in here; callers hold no GIL. */
#ifndef VW_IO_H
#define VW_IO_H

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
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
            err = vw_wait(fd, POLLIN, silence_ms, deadline_ms);
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

#endif
