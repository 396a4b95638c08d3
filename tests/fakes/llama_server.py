#!/usr/bin/env python3
"""A stand-in for llama-server that is as broken as the test asks: `FAKE` in its environment holds JSON.

starts      a file; every start appends its pid on a line
only_first  the faults below apply to so many starts (0 = all)
say         text for stderr at the start
exit        exit at once with this code
loading_s   answer 503 for so long before being ready; -1 = for ever
flood_mib   so much log, as lines of 100 bytes, before listening
long_line   one line of so many bytes, without a newline
odd_bytes   write bytes that are no UTF-8, and control characters
close_out   close stdout and stderr
deaf        ignore SIGTERM
child       a file; start a child in the own group and write its pid there
foreign     a file; let a stranger (own session, pid in the file) take the port, and sit idle
mute        never answer a completion of more than one token
answer_s    a chat's answer takes so long
dead        a file; while it is there no completion is answered
hangs       a file; while it is there /slots is not answered
slots       report so many slots, whatever --parallel says
dies        a path; GET of it ends the process
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

HELP = """\
----- common params -----
-h,    --help, --usage                  print usage and exit
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-cram, --cache-ram N                    set the maximum cache size in MiB
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        use single unified KV buffer shared across all sequences
-lv,   --verbosity, --log-verbosity N   Set the verbosity threshold. Values:
                                         - 0: generic output
                                         - 1: error
                                         - 2: warning
                                         - 3: info
--load-mode {auto,none,mmap}            how to read the model
--no-webui                              no web interface
"""
STRANGER = """
import http.server, os, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"<html>hello</html>")
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Page)
with open(sys.argv[2], "w") as file: file.write(str(os.getpid()))
server.serve_forever()
"""


def argument(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Engine(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: ClassVar[dict] = {}
    n_slots = 1
    ready_at = 0.0
    held: ClassVar[dict[int, int]] = {}
    busy: ClassVar[set[int]] = set()

    def do_GET(self) -> None:
        if self.path == self.faults.get("dies"):
            os._exit(3)
        if time.monotonic() < self.ready_at:
            self.answer(503, {"error": {"message": "Loading model", "code": 503}})
        elif self.path == "/health":
            self.answer(200, {"status": "ok"})
        elif self.path == "/slots":
            wait_while(self.faults.get("hangs"))
            size = int(argument("--ctx-size", "0")) // int(argument("--parallel", "1"))
            self.answer(200, [self.slot(number, size) for number in range(self.n_slots)])
        else:
            self.answer(404, {"error": {"message": "File Not Found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/completion":
            if self.faults.get("mute") and body.get("n_predict") != 1:
                threading.Event().wait()
            wait_while(self.faults.get("dead"))
            Engine.held[body.get("id_slot", 0)] = 1
            self.answer(200, {"content": "x", "id_slot": body.get("id_slot", 0)})
        elif self.path == "/v1/chat/completions":
            self.read_in_slot(body.get("id_slot", 0))
        elif self.path.startswith("/slots/"):
            number = int(self.path.split("/")[2].split("?")[0]) % self.n_slots
            self.answer(400, {"error": {"message": "No available space", "code": number}})
        else:
            self.answer(404, {})

    def read_in_slot(self, number: int) -> None:
        Engine.busy.add(number)
        time.sleep(self.faults.get("answer_s", 0))
        Engine.busy.discard(number)
        self.answer(
            200,
            {
                "choices": [{"message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            },
        )

    def slot(self, number: int, size: int) -> dict:
        found = {"id": number, "n_ctx": size, "is_processing": number in Engine.busy}
        return found | ({"id_task": 1, "n_prompt_tokens": 1} if number in Engine.held else {})

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def wait_while(path: str | None) -> None:
    while path and os.path.exists(path):
        time.sleep(0.02)


def misbehave(faults: dict, port: int) -> None:
    """Everything wrong before the engine listens."""
    if "say" in faults:
        os.write(2, faults["say"].encode() + b"\n")
    if "exit" in faults:
        os._exit(faults["exit"])
    if faults.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "flood_mib" in faults:
        block = (b"x" * 99 + b"\n") * 10_486
        for _ in range(faults["flood_mib"]):
            sys.stderr.buffer.write(block)
        sys.stderr.buffer.flush()
    if "long_line" in faults:
        sys.stderr.buffer.write(b"." * faults["long_line"])
        sys.stderr.buffer.flush()
    if faults.get("odd_bytes"):
        sys.stdout.buffer.write(b"\xff\xfe nul \x00 red \x1b[31m half \xe2\x82\n")
        sys.stdout.buffer.flush()
    if faults.get("close_out"):
        os.close(1)
        os.close(2)
    if "child" in faults:
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with open(faults["child"], "w") as file:
            file.write(str(child.pid))
    if "foreign" in faults:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, [sys.executable, "-S", "-c", STRANGER, str(port), faults["foreign"]])
            os._exit(0)
        os.wait()
        time.sleep(600)


def main() -> None:
    if "--help" in sys.argv:
        print(HELP)
        return
    faults = json.loads(os.environ.get("FAKE", "{}"))
    port = int(argument("--port"))
    if "starts" in faults:
        with open(faults["starts"], "a+") as file:
            file.write(f"{os.getpid()}\n")
            file.flush()
            file.seek(0)
            number = len(file.readlines())
        if 0 < faults.get("only_first", 0) < number:
            faults = {}
    misbehave(faults, port)
    Engine.faults = faults
    Engine.n_slots = faults.get("slots", int(argument("--parallel", "1")))
    loading_s = faults.get("loading_s", 0)
    Engine.ready_at = float("inf") if loading_s < 0 else time.monotonic() + loading_s
    server = ThreadingHTTPServer(("127.0.0.1", port), Engine)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
