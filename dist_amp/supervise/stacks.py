"""What the threads of this process are doing: a line about the main one, and the stacks of all."""

import faulthandler
import os
import sys
import sysconfig
import threading
import traceback
from datetime import UTC, datetime
from pathlib import Path

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


def main_thread_is_in() -> str:
    """The main thread's innermost function that is not a library's, as `loss_sum (task.py, line 12)`; "" for none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places = traceback.extract_stack(frame)[::-1] if frame is not None else []
    own = (p for p in places if "-packages" not in p.filename and not p.filename.startswith((*_LIBRARIES, "<")))
    place = next(own, None)
    return f"{place.name} ({Path(place.filename).name}, line {place.lineno})" if place else ""


def stacks_of_all_threads() -> str:
    """The stacks as faulthandler prints them, innermost function first, and the threads' names."""
    with os.fdopen(os.memfd_create("stacks"), "w+b") as file:  # a full disk is no reason to have none
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        stacks = file.read().decode(errors="replace")
    names = "".join(f"{thread.ident or 0:#018x} {thread.name}\n" for thread in threading.enumerate())
    return f"process {os.getpid()}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, threads:\n{names}\n{stacks}"
