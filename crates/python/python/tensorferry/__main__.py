"""The program `tensorferry`: `python -m tensorferry` and the command of that name are the same."""

import signal
import sys
import threading

from tensorferry import _native


def main() -> int:
    """Runs the program with the arguments of this process, and returns its exit code."""
    if threading.current_thread() is threading.main_thread():
        # Python's own handler would wait for the program to end, and the program is not Python.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(sys.argv[1:], [sys.executable, "-m", "tensorferry"])


if __name__ == "__main__":
    sys.exit(main())
