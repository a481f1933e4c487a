"""How a rank spends its time: a stopwatch that is always in one phase, so that the phases add up to the whole.

On a CPU it reads the host's clock. On a GPU it records events in the compute stream, which nothing waits for: a phase
lasts until the device gets to the next one, so time in which a slow host leaves the device idle counts as well.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import takewhile
from typing import Any, Literal, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

# A step: what this rank does itself; waiting for the other ranks, with the sending; writing the logs, on rank 0.
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
STEP_PHASES = (*OWN_PHASES, "communication", "logging")
# Between steps.
PHASES = (*STEP_PHASES, "evaluation", "checkpoint", "diagnostics")
Phase = Literal[
    "data", "forward", "backward", "optimizer", "other", "communication", "logging",
    "evaluation", "checkpoint", "diagnostics",
]  # fmt: skip

MANY_EVENTS = 2048  # unread; then the older half is read, if the device has passed it


class PhaseClock:
    """Seconds per phase since the last `lap`; it begins in "other". For one thread at a time."""

    def __init__(self, device: torch.device | None = None):
        self.on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self.restart()

    def restart(self) -> None:
        """Forget what was measured."""
        self._phase: Phase = "other"
        self._held = False
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._marks: list[tuple[Phase, Any]] = []  # each phase that has ended, with the event at its end
        self._since = self._now()

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        with suppress(RuntimeError):  # of a device that has failed: what it failed with is raised elsewhere
            event.record()
        return event

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase, unless the present one is held; returns the one before it."""
        before = self._phase
        if not self._held:
            self._end_phase()
            self._phase = phase
        return before

    def _end_phase(self) -> None:
        now = self._now()
        if self.on_gpu:
            self._marks.append((self._phase, now))
            if len(self._marks) >= MANY_EVENTS and self._marks[MANY_EVENTS // 2][1].query():
                self._read(MANY_EVENTS // 2)
        else:
            self._seconds[self._phase] += now - self._since
            self._since = now

    def _read(self, count: int) -> None:
        """Add the oldest marks, which the device has passed, to the seconds."""
        marks, self._marks = self._marks[:count], self._marks[count:]
        if marks:
            self._seconds = self._added(self._seconds, self._since, marks)
            self._since = marks[-1][1]

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """A phase for the length of a with-block."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        """A phase for the length of a with-block, whatever is entered in it: all of an evaluation is evaluation."""
        outermost, before = not self._held, self.enter(phase)
        self._held = True
        try:
            yield
        finally:
            if outermost:
                self._held = False
                self.enter(before)

    def lap(self) -> "Lap":
        """What was measured since the last lap; the present phase goes on."""
        self._end_phase()
        lap = Lap(self._seconds, self._since, self._marks)
        if self._marks:
            self._since = self._marks[-1][1]
        self._seconds, self._marks = dict.fromkeys(PHASES, 0.0), []
        return lap

    def so_far(self) -> dict[str, float]:
        """Seconds by phase since the last lap; on a GPU, of what the device has finished."""
        self._end_phase()
        self._read(len(list(takewhile(lambda mark: mark[1].query(), self._marks))))
        return dict(self._seconds)

    @staticmethod
    def _added(seconds: dict[str, float], begin: Any, marks: list[tuple[Phase, Any]]) -> dict[str, float]:
        seconds = dict(seconds)
        for phase, end in marks:
            seconds[phase] += begin.elapsed_time(end) / 1000
            begin = end
        return seconds


class Lap:
    """The time between two laps of a clock."""

    def __init__(self, seconds: dict[str, float], begin: Any, marks: list[tuple[Phase, Any]]):
        self._seconds, self._begin, self._marks = seconds, begin, marks

    def seconds(self) -> dict[str, float]:
        """By phase, in PHASES' order. On a GPU: once the device has reached the lap's end."""
        return PhaseClock._added(self._seconds, self._begin, self._marks)


def wait_for_device(device: torch.device) -> None:
    """Wait for all queued work on the device: before reading a clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def waits_for_ranks(method: F) -> F:
    """A method of World whose time counts as waiting for the other ranks."""

    @wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.world_size == 1:
            return method(self, *args, **kwargs)
        with self.clock.phase("communication"):
            return method(self, *args, **kwargs)

    return cast(F, timed)
