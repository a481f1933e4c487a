"""What fake_gpu.c has counted, read in the process that runs on it."""

import ctypes
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent.parent
# Frames that only pass a call on.
PASSED_OVER = ("/torch/", "/contextlib.py", "/gpu_stand_in/")

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"])


def counts() -> dict[str, int]:
    """How often each has happened since the process started."""
    text = ctypes.addressof(ctypes.c_char.in_dll(library(), "fake_gpu_names"))
    names = ctypes.string_at(text).decode().split()
    values = (ctypes.c_long * len(names)).in_dll(library(), "fake_gpu_counts")
    return dict(zip(names, values, strict=True))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each happens in a with-block: filled in at its end."""
    before = counts()
    happened: dict[str, int] = {}
    yield happened
    happened |= {name: count - before[name] for name, count in counts().items()}


class Syncs(Counter[str]):
    """{"dist_amp/data.py Batches.at: cudaStreamSynchronize": times}: waits of the host, and where.

    The place is the innermost function outside torch. A wait in a thread that started no Python
    names the thread alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}  # of each, one place with its line
        self._callback = _Callback(self._on_sync)
        self._in_library = ctypes.c_void_p.in_dll(library(), "fake_gpu_on_sync")

    def start(self) -> None:
        self._in_library.value = ctypes.cast(self._callback, ctypes.c_void_p).value

    def stop(self) -> None:
        self._in_library.value = None

    def _on_sync(self, call: bytes) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and any(part in frame.f_code.co_filename for part in PASSED_OVER):
            frame = frame.f_back
        if frame is None:
            place, line = f"thread {threading.current_thread().name}", ""
        else:
            file = frame.f_code.co_filename.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
            place, line = f"{file} {frame.f_code.co_qualname}", f"{file}:{frame.f_lineno}"
        name = f"{place}: {call.decode()}"
        self[name] += 1
        self.lines[name] = line


def launches_of(path: Path) -> list[tuple[int, str]]:
    """(stream, mangled name) of each launch in a file of `traced`."""
    pairs = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return [(int(stream), name) for stream, name in pairs]


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Write each launch of a with-block to a file."""
    library().fake_gpu_trace(str(path).encode())
    try:
        yield
    finally:
        library().fake_gpu_trace(None)
