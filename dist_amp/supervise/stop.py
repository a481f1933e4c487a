"""A signal or notice to any rank, or a callback on any, stops all ranks after the same step."""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from dist_amp.distributed.signals import handle_signals
from dist_amp.world import World

# What the ranks exchange; of two the larger counts, since a run that is preempted is continued.
_TASK = 1.0
_SIGNAL = 2.0

# An exchange takes 1 to 4 ms on gloo, measured on 2 to 6 ranks: too long for every step.
SECONDS_BETWEEN = 1.0
MOST_POLLS_BETWEEN = 32  # should the steps become slower meanwhile


class AgreedStop:
    """Stops all ranks after the same step when any gets a stop signal, or its task asks to end.

    The handler sets a flag. About once a second `poll` starts an exchange of flags and of seconds
    per poll, by which all start the next one at the same step; the next poll reads the result.
    agreed: the same on all ranks, after the same step; by_task: it was no signal's wish.
    """

    def __init__(self, world: World):
        self.agreed = False
        self.by_task = False
        self.ended_by = ""  # who of the task asked, on the ranks where one did
        self.every_poll = False  # it may ask after any step
        self.requested_by = ""  # a signal's name or a notice, on the ranks that got one
        self._requested_at = 0.0
        self._world = world
        self._flags: torch.Tensor | None = None  # of an exchange that is still to be read
        self._exchange: dist.Work | None = None
        self._interval = 1
        self._polls = 0
        self._since = time.monotonic()
        self._handled = handle_signals(self._on_signal)

    def __enter__(self) -> "AgreedStop":
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._finish_exchange()
        self._handled.__exit__(None, None, None)

    def end(self, wish: str) -> None:
        """End the run as completed; wish: who asked, or "" for nobody."""
        self.ended_by = self.ended_by or wish

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # torchrun forwards a Ctrl-C that the rank already got.
        is_again = time.monotonic() - self._requested_at > 2
        if number == signal.SIGINT and self.requested_by == "SIGINT" and is_again:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        if not self.requested_by:
            self.requested_by = signal.Signals(number).name
            self._requested_at = time.monotonic()
            if self._world.is_main:  # not by print, which the signal may have interrupted
                os.write(2, f"\n{self.requested_by}: stopping within a few steps\n".encode())

    def poll(self, now: bool = False) -> bool:
        """True on every rank, at the same step, after a signal to any or a task's wish.

        What is asked for now counts from the next poll on, or with `now` from this one on.
        """
        self._finish_exchange()
        self._polls += 1
        if now or self.every_poll or self._polls >= self._interval:
            self._start_exchange()
        if now:
            self._finish_exchange()
            self._interval = 1  # what follows has another pace
        return self.agreed

    def _start_exchange(self) -> None:
        time_now = time.monotonic()
        wish = 0.0
        if self.requested_by:
            wish = _SIGNAL
        elif self.ended_by:
            wish = _TASK
        # What is asked for, and seconds per poll.
        self._flags = torch.tensor([wish, (time_now - self._since) / max(self._polls, 1)])
        self._polls = 0
        self._since = time_now
        if self._world.control is not None:
            self._exchange = dist.all_reduce(
                self._flags, dist.ReduceOp.MAX, group=self._world.control, async_op=True
            )

    def _finish_exchange(self) -> None:
        if self._flags is None:
            return
        if self._exchange is not None:
            with self._world.clock.phase("communication"):
                self._exchange.wait()
        flag, seconds = self._flags.tolist()
        self._flags = None
        self.agreed = flag > 0
        self.by_task = flag == _TASK
        # At most twice as many polls as before, because the first ones may be the fastest.
        most = min(2 * self._interval, MOST_POLLS_BETWEEN)
        self._interval = max(1, min(most, int(SECONDS_BETWEEN / max(seconds, 1e-6))))
