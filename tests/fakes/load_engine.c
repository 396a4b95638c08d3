// A stand-in for llama-server under load: it takes its command line and costs next to no CPU time.
//
// A chat's body says what happens: `hold_ms` is how long it occupies its slot, `prefill_ms` when the first
// token of a stream comes (further ones each 200 ms), `tag` its name. It runs in the slot `id_slot`; two
// requests in one slot are answered 500. With `--record FILE` one line is written when a chat ends:
// tag, slot, start and end in ms of the monotonic clock, and `done`, `gone` (its client left) or `clash`.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SLOTS_MAX 256
#define TOKEN_MS 200

typedef struct Conn {
    int fd, slot, streamed, tokens; // slot: -1 = no chat runs here
    size_t used, room;
    char *in;
    double started, next, ends; // ms; next = when a token is due
    char tag[64];
} Conn;

static Conn *running[SLOTS_MAX]; // by slot
static int n_slots = 1, n_ctx = 4096, epoll, record = -1;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static const char *argument(int argc, char **argv, const char *name, const char *otherwise) {
    for (int i = 1; i + 1 < argc; i++)
        if (!strcmp(argv[i], name)) return argv[i + 1];
    return otherwise;
}

// Answers are far smaller than a socket's buffer, so a full one means a client that does not read.
static void put(Conn *c, const char *data, size_t n) {
    if (send(c->fd, data, n, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n) shutdown(c->fd, SHUT_RDWR);
}

static void put_json(Conn *c, int status, const char *body) {
    char out[32768];
    int n = snprintf(out, sizeof out,
                     "HTTP/1.1 %d Whatever\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                     status, strlen(body), body);
    put(c, out, (size_t)n);
}

static void put_chunk(Conn *c, const char *body) {
    char out[1024];
    int n = snprintf(out, sizeof out, "%zx\r\n%s\r\n", strlen(body), body);
    put(c, out, (size_t)n);
}

static void put_slots(Conn *c) {
    char body[SLOTS_MAX * 112] = "[", *at = body + 1;
    for (int i = 0; i < n_slots; i++)
        at += sprintf(at, "%s{\"id\":%d,\"n_ctx\":%d,\"is_processing\":%s,\"id_task\":1,\"n_prompt_tokens\":1}",
                      i ? "," : "", i, n_ctx, running[i] ? "true" : "false");
    strcpy(at, "]");
    put_json(c, 200, body);
}

static void note(const char *tag, int slot, double started, const char *how) {
    char line[160];
    int n = snprintf(line, sizeof line, "%s %d %.3f %.3f %s\n", tag, slot, started, now_ms(), how);
    if (record >= 0 && write(record, line, (size_t)n) != n) exit(1);
}

static void end_chat(Conn *c, const char *how) {
    note(c->tag, c->slot, c->started, how);
    running[c->slot] = NULL;
    c->slot = -1;
}

static double number(const char *body, const char *key, double otherwise) {
    const char *at = strstr(body, key);
    return at ? strtod(at + strlen(key), NULL) : otherwise;
}

static void start_chat(Conn *c, const char *body) {
    const char *tag = strstr(body, "\"tag\":\"");
    if (!tag || sscanf(tag + 7, "%63[^\"]", c->tag) != 1) strcpy(c->tag, "-");
    int slot = (int)number(body, "\"id_slot\":", -1);
    for (int i = 0; slot < 0 && i < n_slots; i++)
        if (!running[i]) slot = i;
    if (slot < 0 || slot >= n_slots || running[slot]) {
        note(c->tag, slot, now_ms(), "clash");
        put_json(c, 500, "{\"error\":{\"message\":\"the slot runs another request\"}}");
        return;
    }
    running[slot] = c;
    c->slot = slot;
    c->tokens = 0;
    c->streamed = strstr(body, "\"stream\":true") != NULL;
    c->started = now_ms();
    c->ends = c->started + number(body, "\"hold_ms\":", 0);
    c->next = c->started + number(body, "\"prefill_ms\":", 0);
    if (c->streamed) {
        const char *head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                           "Transfer-Encoding: chunked\r\n\r\n";
        put(c, head, strlen(head));
    }
}

// Send what is due at `now`; the answer is when this chat wants to be looked at again.
static double go_on(Conn *c, double now) {
    if (c->streamed && now >= c->next && c->next < c->ends) {
        put_chunk(c, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"tok \"}}]}\n\n");
        c->tokens++;
        c->next += TOKEN_MS;
    }
    if (now < c->ends) return c->streamed && c->next < c->ends ? c->next : c->ends;
    end_chat(c, "done"); // before the answer: whoever has that can read the record
    char timings[128];
    sprintf(timings, "\"timings\":{\"cache_n\":0,\"prompt_n\":100,\"predicted_n\":%d}", c->tokens);
    char body[512];
    if (c->streamed) {
        sprintf(body, "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}],%s}\n\n", timings);
        put_chunk(c, body);
        put_chunk(c, "data: [DONE]\n\n");
        put(c, "0\r\n\r\n", 5);
    } else {
        sprintf(body,
                "{\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"hello\"},"
                "\"finish_reason\":\"stop\"}],%s}",
                timings);
        put_json(c, 200, body);
    }
    return 0;
}

static void answer(Conn *c, const char *head, char *body) {
    if (!strncmp(head, "POST /v1/chat/completions", 25)) start_chat(c, body); // with any query
    else if (!strncmp(head, "POST /completion ", 17)) put_json(c, 200, "{\"content\":\"x\",\"id_slot\":0}");
    else if (!strncmp(head, "GET /slots ", 11)) put_slots(c);
    else if (!strncmp(head, "GET /health ", 12)) put_json(c, 200, "{\"status\":\"ok\"}");
    else put_json(c, 404, "{\"error\":{\"message\":\"File Not Found\"}}");
}

// Answer the whole requests that have come, one at a time.
static void take_requests(Conn *c) {
    while (c->slot < 0) {
        char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
        if (!end) return;
        end[2] = 0;
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        size_t n_head = (size_t)(end - c->in) + 4, n_body = length ? strtoul(length + 17, NULL, 10) : 0;
        if (c->used < n_head + n_body) {
            end[2] = '\r';
            return;
        }
        char *body = strndup(c->in + n_head, n_body);
        answer(c, c->in, body);
        free(body);
        c->used -= n_head + n_body;
        memmove(c->in, c->in + n_head + n_body, c->used);
    }
}

static void accept_one(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC), one = 1;
    if (fd < 0) return;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    Conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->slot = -1;
    c->in = malloc(c->room = 8192);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

static void receive(Conn *c) {
    if (c->used == c->room) c->in = realloc(c->in, c->room *= 2);
    ssize_t n = recv(c->fd, c->in + c->used, c->room - c->used, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
        c->used += (size_t)n;
        take_requests(c);
        return;
    }
    if (c->slot >= 0) end_chat(c, "gone");
    close(c->fd);
    free(c->in);
    free(c);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "--help")) {
        puts("a llama-server for load tests");
        return 0;
    }
    n_slots = atoi(argument(argc, argv, "--parallel", "1"));
    if (n_slots < 1 || n_slots > SLOTS_MAX) return 2;
    n_ctx = atoi(argument(argc, argv, "--ctx-size", "4096")) / n_slots;
    const char *file = argument(argc, argv, "--record", NULL);
    if (file && (record = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0) return 1;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    at.sin_port = htons((uint16_t)atoi(argument(argc, argv, "--port", "0")));
    if (bind(listener, (void *)&at, sizeof at) || listen(listener, 1024)) return 1;
    epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN}, events[64];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        double now = now_ms(), wake = now + 1000;
        for (int i = 0; i < n_slots; i++) {
            Conn *c = running[i];
            double due = c ? go_on(c, now) : wake;
            if (c && !running[i]) take_requests(c); // a pipelined one may start in any slot: look at all again
            if (due < wake) wake = due;
        }
        int wait_ms = wake > now ? (int)(wake - now) + 1 : 0;
        int n = epoll_wait(epoll, events, 64, wait_ms);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr) receive(events[i].data.ptr);
            else accept_one(listener);
        }
    }
}
