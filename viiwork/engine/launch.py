"""Run as a script: tie this process to its parent's life, then become the engine.

    python -I -S launch.py PARENT_PID ARGV...

A program of its own because code between fork and exec is unsafe in a process with threads. The process id
stays the same. On Linux the kernel kills the engine when the node's thread that started it ends, whatever
ended it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, argv: list[str]) -> None:
    """Never returns: executes `argv`, or exits with 126 or 127 as a shell would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before the line above could bind us to it
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and that would survive the exec
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        os.write(2, f"error: cannot run {argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
