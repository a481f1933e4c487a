"""Time per phase on each rank. The clock is always in exactly one phase, so the times add up.

On a GPU it records events in the compute stream, without host-device synchronisation. A phase lasts
until the device reaches the next event, so the time that the device waits for the host counts too.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")  # this rank's own work
# "communication" includes the wait for other ranks; "logging" happens on rank 0 only.
STEP_PHASES = (*OWN_PHASES, "communication", "logging")
PHASES = (*STEP_PHASES, "evaluation", "checkpoint", "diagnostics")  # the last 3: between steps

MANY_MARKS = 2048  # at so many marks, those that the device has passed are read, to free events


class PhaseClock:
    """Seconds per phase since the last `lap`; begins in "other". Not thread-safe."""

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
        with suppress(RuntimeError):  # after a device error, which is raised elsewhere
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
        """A phase for a with-block that ignores phases inside: evaluation has no "forward"."""
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
        """Seconds per phase since the last lap; on a GPU, up to the last event it has reached."""
        self._lap.end(self._phase, self._now())
        return self._lap.seconds(finished_only=True)


class Lap:
    """The phases between two calls of `lap`."""

    def __init__(self, begin: Any):
        self._since = begin  # where the first unread phase began
        self._marks: list[tuple[str, Any]] = []  # unread: (phase, time or event of its end)
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def end(self, phase: str, moment: Any) -> None:
        self._marks.append((phase, moment))
        if len(self._marks) >= MANY_MARKS:
            self.seconds(finished_only=True)

    def seconds(self, finished_only: bool = False) -> dict[str, float]:
        """{phase: seconds} for PHASES. A GPU must have finished the lap, unless finished_only."""
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
