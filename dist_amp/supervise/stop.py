"""Stops all ranks after the same step, if any rank gets a signal or its task asks to end the run.

A rank that stopped alone would leave the others waiting in their next collective. So a signal's
handler only sets a flag, and the ranks exchange their flags: every rank calls `poll` after each
step, and about once a second a poll starts an all-reduce (MAX) over gloo, which overlaps with the
next step. The next poll reads the result, so all ranks learn of a stop after the same step.
They must also start the next all-reduce at the same poll. So each all-reduce also carries the
seconds per poll of the slowest rank, from which all compute the number of polls until the next.
"""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from dist_amp.distributed.process import has_any_rank_reported
from dist_amp.distributed.signals import handle_signals
from dist_amp.world import World

# The flags, of which MAX takes the larger: with both, the run ends as preempted, to be continued.
_TASK = 1.0
_SIGNAL = 2.0

# An all-reduce takes 1 to 4 ms on gloo, measured on 2 to 6 ranks: too long for every step.
SECONDS_BETWEEN = 1.0
MAX_POLLS_BETWEEN = 32  # in case steps become slower in between


class AgreedStop:
    """agreed: whether all ranks stop now. by_task: whether `end` was called, and no signal came."""

    def __init__(self, world: World):
        self.agreed = False
        self.by_task = False
        self.ended_by = ""  # who asked to end the run as completed, on a rank with such a request
        self.every_poll = False  # exchange at each poll, for a task that may ask after any step
        self.requested_by = ""  # a signal's name or an eviction notice, on a rank that got it
        self._requested_at = 0.0
        self._world = world
        self._pending: torch.Tensor | None = None  # [flag, seconds per poll], in an all-reduce
        self._all_reduce: dist.Work | None = None
        self._interval = 1  # polls from one all-reduce to the next
        self._polls = 0  # since the last all-reduce
        self._since = time.monotonic()  # when the last all-reduce started
        self._handlers = handle_signals(self._on_signal)

    def __enter__(self) -> "AgreedStop":
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # after an error, other ranks may be gone
            self._finish_exchange()
        self._handlers.__exit__(None, None, None)

    def end(self, request: str) -> None:
        """Ask to end the run as completed. request: who asks, for the message; "" is no request."""
        self.ended_by = self.ended_by or request

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # One Ctrl-C may arrive twice: from the terminal, and forwarded by torchrun.
        is_second = time.monotonic() - self._requested_at > 2
        if number == signal.SIGINT and self.requested_by == "SIGINT" and is_second:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        if not self.requested_by:
            self.requested_by = signal.Signals(number).name
            self._requested_at = time.monotonic()
            # A failed rank's error stays the last line. os.write: this may interrupt a print.
            if self._world.is_main and not has_any_rank_reported():
                os.write(2, f"\n{self.requested_by}: stopping within a few steps\n".encode())

    def poll(self, now: bool = False) -> bool:
        """Whether to stop; every rank calls it after the same step, and gets the same answer.

        A request takes effect at one of the next polls; with `now`, which waits, at this one.
        """
        self._finish_exchange()
        self._polls += 1
        if now or self.every_poll or self._polls >= self._interval:
            self._start_exchange()
        if now:
            self._finish_exchange()
            self._interval = 1  # the next polls may come at another rate
        return self.agreed

    def _start_exchange(self) -> None:
        time_now = time.monotonic()
        flag = 0.0
        if self.requested_by:
            flag = _SIGNAL
        elif self.ended_by:
            flag = _TASK
        self._pending = torch.tensor([flag, (time_now - self._since) / max(self._polls, 1)])
        self._polls = 0
        self._since = time_now
        if self._world.control is not None:
            self._all_reduce = dist.all_reduce(
                self._pending, dist.ReduceOp.MAX, group=self._world.control, async_op=True
            )

    def _finish_exchange(self) -> None:
        if self._pending is None:
            return
        if self._all_reduce is not None:
            with self._world.clock.phase("communication"):
                self._all_reduce.wait()
        flag, seconds = self._pending.tolist()
        self._pending = None
        self.agreed = flag > 0
        self.by_task = flag == _TASK
        # The interval at most doubles, because the first polls may be faster than later ones.
        limit = min(2 * self._interval, MAX_POLLS_BETWEEN)
        self._interval = max(1, min(limit, int(SECONDS_BETWEEN / max(seconds, 1e-6))))
