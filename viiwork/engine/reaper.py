"""Run as a script: kill the engines' process groups when the node is gone, however it went.

    python -I -S reaper.py < pipe

Reads `+PGID` and `-PGID` lines; end of file means the only writer, the node, has ended. The parent-death
signal of launch.py covers the engine itself and only on Linux; this covers its children, and macOS.
"""

import os
import signal
import sys
import time

ROUNDS = 3  # a group may fork while it is being killed
PAUSE_S = 0.1


def main() -> None:
    """Serve one node until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole service must not end the guard first
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        sign, group = line[:1], int(line[1:])
        if sign == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for _ in range(ROUNDS if groups else 0):
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except OSError:
                continue  # already empty
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
