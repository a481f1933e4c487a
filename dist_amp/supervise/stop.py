"""A signal to any rank, or the task's callback on any, stops all ranks after the same step."""

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

    The signal handler only sets a flag. `poll`, called by every rank once per step, starts an
    exchange of the flags between the hosts about once a second, and returns its result a step
    later, because it overlaps the step. The exchange also carries each rank's seconds per poll, so
    that all ranks start the next one at the same step.
    """

    def __init__(self, world: World):
        self.requested_by = ""  # the first signal's name
        self.ended_by = ""  # what of the task asked to end the run, on the ranks where it did
        self.agreed = False  # what the last poll returned
        self.by_task = False  # whether what the last poll returned was the task's wish
        self.every_poll = False  # exchange at each: the task may ask to stop after any step
        self._requested_at = 0.0
        self._world = world
        self._flags = torch.zeros(2)  # what is asked for, and seconds per poll
        self._on_host = self._flags.numpy()
        self._within = ""
        self._interval = 1
        self._polls = 0
        self._since = time.monotonic()
        self._exchange: dist.Work | None = None
        self._handled = handle_signals(self._on_signal)

    def __enter__(self) -> "AgreedStop":
        self._handled.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._exchange is not None and error[0] is None:
            self._exchange.wait()
        self._handled.__exit__(None, None, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # torchrun forwards a Ctrl-C that the rank already got.
        is_again = time.monotonic() - self._requested_at > 2
        if number == signal.SIGINT and self.requested_by == "SIGINT" and is_again:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        if not self.requested_by:
            self.requested_by = signal.Signals(number).name
            self._requested_at = time.monotonic()
            if self._world.is_main:  # not by print, which the signal may have interrupted
                os.write(2, f"\n{self.requested_by}: stopping after this step\n".encode())

    def poll(self, within: str = "training") -> bool:
        """True on every rank, at the same step, after a signal to any or a task's wish.

        The task's wish counts from the next poll on, on one process too: the step does not depend
        on how many ranks. within: where the rank is; polls come at another pace elsewhere.
        """
        wish = 0.0
        if self.requested_by:
            wish = _SIGNAL
        elif self.ended_by:
            wish = _TASK
        if self._world.control is None:
            flag = wish if wish == _SIGNAL else float(self._on_host[0])
            self._on_host[0] = wish
        else:
            flag = self._finish_exchange()
            self._polls += 1
            if self._within != within:
                self._within = within
                self._interval = 1
            if self.every_poll or self._polls >= self._interval:
                self._start_exchange(wish)
        self.agreed = flag > 0
        self.by_task = flag == _TASK
        return self.agreed

    def _start_exchange(self, wish: float) -> None:
        now = time.monotonic()
        self._on_host[0] = wish
        self._on_host[1] = (now - self._since) / max(self._polls, 1)
        self._polls = 0
        self._since = now
        self._exchange = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._world.control, async_op=True
        )

    def _finish_exchange(self) -> float:
        """What is asked for, by the exchange that is under way; 0 where there is none."""
        if self._exchange is None:
            return 0.0
        with self._world.clock.phase("communication"):
            self._exchange.wait()
        self._exchange = None
        # No more than twice as many polls as before, because the first ones may be the fastest.
        most = min(2 * self._interval, MOST_POLLS_BETWEEN)
        seconds = max(float(self._on_host[1]), 1e-6)
        self._interval = max(1, min(most, int(SECONDS_BETWEEN / seconds)))
        return float(self._on_host[0])

    def poll_now(self) -> bool:
        """`poll` without a delay, for places where the ranks wait for each other anyway."""
        self._finish_exchange()  # what it brings, the next one brings again
        self._interval = 1
        self.poll(self._within)
        return self.poll(self._within)
