"""Requests as clients, pages, broken programs and attackers write them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

from hypothesis import strategies as st

METHODS = (
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "FOO",
    "get",
    "M-SEARCH",
)
ODD_TEXTS = (
    "",
    " ",
    "m",
    "nope",
    "mesh",
    "null",
    "None",
    "true",
    "-1",
    "0",
    "1e999",
    "9" * 400,
    "a/b",
    "a:b",
    "../x",
    "%2F",
    "%",
    "%zz",
    "%00",
    "?x",
    "#x",
    "a,b,c,d,e,f,g,h,i,j",
    "x" * 5000,
    "ünï",
    "\ud83d",
    "\x00",
    "\x1b[2J",
    "<script>",
    "{}",
    "[]",
    '{"session_id":"s"}',
)
ODD_VALUES = (None, True, False, 0, -1, 1.5, 2**70, 1e308, "", [], {}, [[]], {"a": {}}, "m", "nope")
KEYS = (
    *("model", "messages", "prompt", "input", "stream", "n", "id_slot", "max_tokens", "metadata", "user_id"),
    *("session_id", "prompt_cache_key", "models", "target", "fallbacks", "force", "content", "role", "tools"),
    *("entries", "version", "aliases", "name", "stream_options", "include_usage", "documents", "query", "v"),
)
QUERY_KEYS = ("host", "prefer", "model", "table", "rid", "addr", "beta", "since", "limit", "x")
HEADERS = (
    *("X-Session-Affinity", "X-Session-Id", "X-Claude-Code-Session-Id", "session_id", "conversation_id"),
    *("X-Viiwork-Forwarded", "X-Viiwork-Node", "X-Viiwork-Ts", "X-Viiwork-Nonce", "X-Viiwork-Auth"),
    *("X-Viiwork-Prefer", "X-Viiwork-Kv-Share", "X-Viiwork-Task", "X-Viiwork-Request", "Authorization"),
    *("Origin", "Access-Control-Request-Method", "Access-Control-Request-Headers", "Content-Type"),
    *("Content-Encoding", "Accept", "Accept-Encoding", "Expect", "Connection", "Upgrade", "Range", "Cookie"),
    *("If-None-Match", "Last-Event-ID", "X-Forwarded-For", "Referer", "User-Agent", "TE", "Keep-Alive"),
)
HEADER_VALUES = (
    *("application/json", "text/plain", "multipart/form-data; boundary=x", "gzip", "identity", "close"),
    *("keep-alive", "100-continue", "upgrade", "viiwork-kv/2", "websocket", "null", "http://evil.example"),
    *("http://localhost:3000", "http://127.0.16.1", "POST", "off", "v1=x", "v1=" + "A" * 43, "a, b, c"),
    *("fuzzed", "text/event-stream", "*/*", "1", "-1", "99999999999999999999", "user_x_session_y"),
)

texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=20))
scalars = st.one_of(st.sampled_from(ODD_VALUES), texts, st.integers(), st.floats())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), texts), inner, max_size=4),
    ),
    max_leaves=8,
)
# Near to what an endpoint expects, so that more than the first check is met.
plausible = st.fixed_dictionaries(
    {},
    optional={
        "model": st.one_of(st.just("m"), scalars),
        "messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), values),
        "stream": st.one_of(st.booleans(), scalars),
        "models": st.one_of(st.just(["m"]), st.lists(texts, max_size=3), values),
        "target": st.one_of(st.just("m"), values),
        "fallbacks": st.one_of(st.lists(texts, max_size=3), values),
        "metadata": values,
        "prompt_cache_key": scalars,
        "n": scalars,
        "id_slot": scalars,
    },
)
DEEP = b"[" * 20_000 + b"]" * 20_000
bodies = st.one_of(
    st.builds(lambda value: json.dumps(value).encode(), st.one_of(plausible, plausible, values)),
    st.builds(lambda v: json.dumps(v, ensure_ascii=False).encode("utf-8", "surrogatepass"), plausible),
    st.sampled_from(
        [
            *(
                b"",
                b"{",
                b"[]",
                b'"m"',
                b"null",
                b"\xef\xbb\xbf{}",
                b'{"model":"m",}',
                b'{"model":NaN}',
                DEEP,
            ),
            *(b'{"model":"m","model":"nope"}', b'{"model":"\xe5"}', b'{"model":"\\ud83d"}', b"a=b&c=d"),
            *(b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"model":"m","stream":true}', b"9" * 5000, b"\x00"),
        ]
    ),
    st.binary(max_size=60),
)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    version: str = "1.1"

    def raw(self) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/{self.version}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.body or self.method in ("POST", "PUT", "PATCH"):
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + self.body


def _clean(text: str) -> str:
    """What may stand in one line of a head."""
    return "".join(c for c in text if c.isprintable() or "\udc80" <= c <= "\udcff").strip()[:8000]


def requests(path: str, methods: tuple[str, ...], port: int) -> st.SearchStrategy[Request]:
    """Requests for a route, mostly with a method it takes."""
    name = st.one_of(st.sampled_from(["m", "a%2Fb", "x/revert", "%00", ".."]), texts.map(_in_path))
    base = name.map(lambda text: path[:-1] + text) if path.endswith("/*") else st.just(path)
    shapes = st.sampled_from(
        [
            *[lambda p: p] * 8,
            lambda p: p + "/",
            lambda p: p.replace("/", "//"),
            lambda p: p + "#frag",
            lambda p: f"http://elsewhere.example{p}",
            lambda p: p + "%00",
            lambda p: p.upper(),
            lambda p: p + "/../..",
        ]
    )
    pair = st.builds(
        lambda key, value: f"{_in_path(key)}={_in_path(value)}", st.sampled_from(QUERY_KEYS), texts
    )
    query = st.one_of(
        st.just(""), st.lists(pair, min_size=1, max_size=4).map(lambda pairs: "?" + "&".join(pairs))
    )
    target = st.builds(lambda p, shape, q: shape(p) + q, base, shapes, query)
    here = f"127.0.0.1:{port}"
    host = st.sampled_from(
        [here] * 6 + ["localhost", "evil.example", "", "[::1]:1", "a b", "127.0.0.1:99999"]
    )
    kind = st.sampled_from(
        ["application/json"] * 4 + ["application/json; charset=utf-8", "text/plain", "", "x/y"]
    )
    header = st.tuples(st.sampled_from(HEADERS), st.one_of(st.sampled_from(HEADER_VALUES), texts.map(_clean)))
    more = st.lists(header, max_size=4, unique_by=lambda h: h[0].lower()).filter(
        lambda found: not any(name == "Content-Type" for name, _ in found)
    )
    return st.builds(
        lambda method, where, at, content, rest, body, version: Request(
            method, where, (("Host", at), ("Content-Type", content), *rest), body, version
        ),
        st.one_of(st.sampled_from(methods), st.sampled_from(methods), st.sampled_from(METHODS)),
        target,
        host,
        kind,
        more,
        bodies,
        st.sampled_from(["1.1"] * 7 + ["1.0"]),
    )


def _in_path(text: str) -> str:
    return quote(text, safe="%/:;,@!$&'()*+~._-", errors="surrogatepass")
