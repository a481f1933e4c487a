"""What ends a launcher by a signal before it has ranks: one line. Imports no torch, which takes seconds."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

BEFORE_RANKS = " before any rank had started"


def exit_on_signals() -> None:
    """For the time of the imports, in which an exception would be a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """KeyboardInterrupt on SIGTERM too, with the signal's name."""
    in_main = threading.current_thread() is threading.main_thread()  # Python allows handlers only there
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {number: signal.signal(number, _raise) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is _exit else handler)


def say_stopped(name: str, when: str) -> int:
    """Print the line; returns the exit status."""
    print(f"error: stopped by {name or 'SIGINT'}{when}", file=sys.stderr, flush=True)
    return 1


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(say_stopped(signal.Signals(number).name, BEFORE_RANKS))


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
