"""A signal to any rank, or the task's callback on any, stops all ranks after the same step."""

import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from dist_amp.runtime.process import STOP_SIGNALS
from dist_amp.world import World

# What the ranks exchange; of two the larger counts, since a run that is preempted goes on later.
_TASK, _SIGNAL = 1.0, 2.0


class AgreedStop:
    """Stops all ranks after the same step when any of them gets a stop signal, or its task asks to end the run.

    The signal handler only sets a flag. `poll`, called by every rank once per step, starts an exchange of the flags
    between the hosts and returns the result of the previous one. The exchange overlaps the step, so a stop comes one
    step late.
    """

    def __init__(self, world: World):
        self.requested_by = ""  # the first signal's name
        self.ended_by = ""  # what of the task asked to end the run, on the ranks where it did
        self.agreed = False  # what the last poll returned
        self.by_task = False  # whether that was the task's wish, and no signal's
        self._requested_at = 0.0
        self._world = world
        self._flag = torch.zeros(1)
        self._flag_on_host = self._flag.numpy()
        self._exchange: dist.Work | None = None
        self._previous_handlers: dict[int, object] = {}

    def __enter__(self) -> "AgreedStop":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in STOP_SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        if self._exchange is not None and error[0] is None:
            self._exchange.wait()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = time.monotonic() - self._requested_at > 2  # torchrun forwards a Ctrl-C that the rank already got
        if number == signal.SIGINT and self.requested_by == "SIGINT" and again:
            raise KeyboardInterrupt  # a second Ctrl-C stops at once
        if not self.requested_by:
            self.requested_by, self._requested_at = signal.Signals(number).name, time.monotonic()

    def poll(self) -> bool:
        """True on every rank, at the same step, after any rank got a stop signal or its task asked to end the run.

        The task's wish counts from the next poll on, on one process too: the step does not depend on how many ranks.
        """
        if self._exchange is not None:
            self._exchange.wait()
        flag = float(self._flag_on_host[0])
        self._flag_on_host[0] = own = _SIGNAL if self.requested_by else _TASK if self.ended_by else 0.0
        if self._world.control is None:
            flag = max(flag, own) if own == _SIGNAL else flag
        else:
            self._exchange = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        self.agreed, self.by_task = flag > 0, flag == _TASK
        return self.agreed

    def poll_now(self) -> bool:
        """`poll` without the delay of a step, for places where the ranks wait for each other anyway."""
        self.poll()
        return self.poll()
