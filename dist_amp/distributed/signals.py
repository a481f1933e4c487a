"""Signals that stop a run, and their handlers. Doesn't import torch, which takes seconds."""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

BEFORE_RANKS = " before any rank had started"  # appended to the line "stopped by SIGTERM"


@contextmanager
def handle_signals(handler: Handler, numbers: Iterable[int] = STOP_SIGNALS) -> Iterator[None]:
    """Handle these signals in a with-block; does nothing outside the main thread."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


# --- commands


def end_on_ctrl_c() -> None:
    """Let Ctrl-C end the process at once during imports, instead of printing a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def after_imports() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that raises KeyboardInterrupt with the signal's name."""
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def quiet_on_closed_pipe() -> Iterator[None]:
    """End with status 1 and no traceback if nobody reads the output, as in `--help | head -3`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not any(events & select.POLLERR for _, events in output.poll(0)):
            raise  # another pipe is closed, not the output
        # Discard the rest of the output, which the interpreter flushes once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
