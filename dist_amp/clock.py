"""Time per phase on each rank: the clock is always in one phase, so all add up to the total.

On a GPU it records events in the compute stream, which nothing waits for: a phase lasts until the
device reaches the next one, so time in which a slow host leaves the device idle counts too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

# In a step: this rank's own work; communication, which includes the wait for other ranks; and
# logging, on rank 0.
OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
STEP_PHASES = (*OWN_PHASES, "communication", "logging")
# Between steps.
PHASES = (*STEP_PHASES, "evaluation", "checkpoint", "diagnostics")

MANY_MARKS = 2048  # at so many unread marks, those that the device has reached are read


class PhaseClock:
    """Seconds per phase since the last `lap`; it begins in "other". For one thread at a time."""

    def __init__(self, device: torch.device | None = None):
        self.on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._now: Callable[[], Any] = self._recorded_event if self.on_gpu else time.perf_counter
        self.restart()

    def restart(self) -> None:
        self._phase = "other"
        self._held = False
        self._lap = Lap(self._now())

    def _recorded_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        with suppress(RuntimeError):  # the device has failed; the error is raised elsewhere
            event.record()
        return event

    def enter(self, phase: str) -> str:
        """Begin a phase, unless the current one is held; returns the previous one."""
        previous = self._phase
        if not self._held:
            self._lap.end(previous, self._now())
            self._phase = phase
        return previous

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        previous = self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)

    @contextmanager
    def hold(self, phase: str) -> Iterator[None]:
        """A phase for a with-block, in which others are ignored: an evaluation has no "forward"."""
        if self._held:
            yield
            return
        with self.phase(phase):
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def lap(self) -> "Lap":
        """The times since the last lap; the current phase continues."""
        now = self._now()
        lap = self._lap
        lap.end(self._phase, now)
        self._lap = Lap(now)
        return lap

    def so_far(self) -> dict[str, float]:
        """Seconds per phase since the last lap; on a GPU, of what the device has finished."""
        self._lap.end(self._phase, self._now())
        return self._lap.seconds(finished_only=True)


class Lap:
    def __init__(self, begin: Any):
        self._since = begin  # where the first unread phase began
        self._marks: list[tuple[str, Any]] = []  # unread: ended phases, and when each ended
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def end(self, phase: str, moment: Any) -> None:
        self._marks.append((phase, moment))
        if len(self._marks) >= MANY_MARKS:
            self.seconds(finished_only=True)

    def seconds(self, finished_only: bool = False) -> dict[str, float]:
        """{phase: seconds} by PHASES. A GPU must have finished the lap, unless finished_only."""
        read = 0
        for phase, moment in self._marks:
            if isinstance(moment, float):
                self._seconds[phase] += moment - self._since
            elif finished_only and not moment.query():
                break
            else:
                self._seconds[phase] += self._since.elapsed_time(moment) / 1000
            self._since = moment
            read += 1
        del self._marks[:read]
        return dict(self._seconds)
