"""torchrun's elastic agent in this process: whether to restart failed ranks, and how they ended.

A subclass takes the agent's place in torch's module, and reads private names. Where torch has other
ones, failures are restarted as by torchrun, and exit codes after a signal are unknown. A rank that
fails by itself leaves its report in torchrun's error file (supervise/failure.py).
"""

import math
import os
import re
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.launcher import api

from dist_amp.distributed.process import LAUNCHER, in_time
from dist_amp.distributed.rendezvous import loopback_listener
from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, DataError, Failure, NumericsError

GONE_SECONDS = 15.0  # assumed: by then ranks that save or fail without the lost node have ended
SAVED_AND_LEAVES = """saved: this node leaves; those without a signal continue, unless it had the \
rendezvous; the same command joins again"""
SECONDS_TO_AGAIN = 1.0  # assumed: two SIGINT in less are one Ctrl-C, sent to the launcher twice

KINDS = (Failure, ConfigError, DataError, NumericsError)
FAILS_AGAIN = (ConfigError.exit_code, NumericsError.exit_code, SAVED_AND_STOPPED)
KNOWN = {0, SAVED_AND_STOPPED, *(kind.exit_code for kind in KINDS)}

Failures = Mapping[int, ProcessFailure]  # by rank, of this machine, when the agent looked


# --- the agent


def run_agent(options: Namespace, restarts: "Restarts") -> None:
    """Run torchrun's agent in this process until all ranks have ended.

    Errors: torchrun's, with `exit_codes`: one of each rank of this machine that was started.
    """
    signals = Signals()

    class Agent(LocalElasticAgent):
        complete_at = 0.0  # when all nodes of this start were there

        def _rendezvous(self, worker_group: Any) -> None:
            if restarts.elastic:
                say_waiting(worker_group.spec.rdzv_handler)
            super()._rendezvous(worker_group)
            self.complete_at = time.monotonic()
            if restarts.elastic:
                number, size = worker_group.group_rank, worker_group.group_world_size
                say(f"this one has joined as node {number} of {size}; node 0 prints the run")

        def _start_workers(self, worker_group: Any) -> Any:
            signals.held = True  # the agent does not know these ranks yet: it would leave them
            started = super()._start_workers(worker_group)
            signals.held = False
            signals.deliver()
            return started

        def run(self, *role: str) -> Any:
            try:
                return super().run(*role)
            except Exception as error:
                exit_codes = [process.returncode for process in _processes(self)]
                error.exit_codes = exit_codes  # type: ignore[attr-defined]
                if restarts.elastic and isinstance(error, SignalException):
                    leave(self._worker_group.spec.rdzv_handler, self.complete_at)
                    if {*exit_codes} == {SAVED_AND_STOPPED}:
                        say(SAVED_AND_LEAVES)
                raise

        def _monitor_workers(self, worker_group: Any) -> Any:
            signals.deliver()  # torch's agent may have swallowed the exception
            result = super()._monitor_workers(worker_group)
            left = getattr(self, "_remaining_restarts", 0)
            runs = restarts.elastic and result.state == WorkerState.HEALTHY
            if result.failures:
                joins = restarts.elastic and worker_group.spec.rdzv_handler.num_nodes_waiting() > 0
                self._remaining_restarts = restarts(result.failures, left, joins)
            elif not runs or is_complete(worker_group):
                self.complete_at = time.monotonic()
            elif time.monotonic() - self.complete_at > GONE_SECONDS:
                say("one has left, for which ranks wait here: all restart")
                result.state = WorkerState.UNHEALTHY
                self._remaining_restarts = left + 1  # torch's agent takes one away
            return result

        def _restart_workers(self, worker_group: Any) -> None:
            os.environ["DIST_AMP_FAILED_AT"] = f"{time.time()}"  # for telemetry/startup.py
            super()._restart_workers(worker_group)

        def _shutdown(self, *after_signal: Any, **timeout: Any) -> None:
            if after_signal or signals.arrived:  # a second one may have lost the first
                signals.saving(_processes(self))
            elif not timeout and self._worker_group.state == WorkerState.HEALTHY:
                say("one joins: all ranks save and restart")
                if hasattr(self, "_shutdown_timeout"):  # not the 30 s after a failure
                    timeout["timeout"] = self._shutdown_timeout
            super()._shutdown(*after_signal, **timeout)

    os.environ[LAUNCHER] = str(os.getpid())
    with (
        patch.object(api, "LocalElasticAgent", Agent),
        patch.object(c10d_rendezvous_backend, "TCPStore", local_store, create=True),
        patch.object(processes, "_terminate_process_handler", signals, create=True),
    ):
        torchrun.run(options)


def local_store(host: str, port: int, **options: Any) -> dist.Store:  # type: ignore[name-defined]
    """torchrun's store, which other machines can't reach if it is for this one."""
    if options.get("is_master"):
        port, options["master_listen_fd"] = loopback_listener(host, port)
    return dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]


def is_complete(worker_group: Any) -> bool:
    """Whether all nodes that have started together are still there."""
    with suppress(AttributeError):
        state = worker_group.spec.rdzv_handler._state_holder.state  # at most 1 s old
        return len(state.participants) >= worker_group.group_world_size
    return True


def leave(handler: Any, joined_at: float) -> None:
    """Tell the other nodes that this one has left, which they would notice after 15 s."""
    with suppress(Exception):
        time.sleep(max(0.0, joined_at + 2 - time.monotonic()))  # they look each second
        handler._stop_heartbeats()
        exit_it = dynamic_rendezvous._RendezvousExitOp()
        in_time(5.0, lambda: handler._op_executor.run(exit_it, math.inf))


def say_waiting(handler: Any) -> None:
    with suppress(AttributeError):  # etcd's handler has no settings
        to = handler.settings
        more = to.timeout.last_call.total_seconds()
        lost = more + to.keep_alive_interval.total_seconds() * to.keep_alive_max_attempt
        text = f"waiting for at least {to.min_nodes}, and {more:g} s for more"
        say(f"{text} ({lost:g} s if one was lost)")


def say(text: str) -> None:
    print(f"nodes  {text}", file=sys.stderr, flush=True)


class Signals:
    """In place of torch's signal handler, whose exception may come at a bad time, or be swallowed.

    Held while ranks start. Once they save, only a second Ctrl-C counts, and kills them.
    """

    def __init__(self) -> None:
        self.held = False
        self.arrived: signal.Signals | None = None
        self._ranks: Sequence[Any] = ()
        self._saving_since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._saving_since:
            self.arrived = signal.Signals(number)
            if not self.held:
                self.deliver()
        elif number == signal.SIGINT and time.monotonic() - self._saving_since >= SECONDS_TO_AGAIN:
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    rank.kill()

    def deliver(self) -> None:
        """Errors: SignalException if a signal has arrived."""
        if self.arrived is not None:
            text = f"process {os.getpid()} got {self.arrived.name}"
            raise SignalException(text, sigval=self.arrived)

    def saving(self, ranks: Sequence[Any]) -> None:
        """These processes save after a signal from now on."""
        self._ranks = ranks
        self._saving_since = time.monotonic()


def _processes(agent: LocalElasticAgent) -> list[Any]:
    """The ranks of this machine, each a subprocess.Popen; [] if unknown."""
    handlers = getattr(getattr(agent, "_pcontext", None), "subprocess_handlers", {})
    return [handler.proc for handler in handlers.values()]


# --- how the ranks ended


class Ended(NamedTuple):
    """The rank that explains a failure.

    text: its report or ""; step: how many it had taken; line: the text in one line, if it is of
    this project; at_start: its process had taken none; transient: another rank is the cause.
    """

    rank: int
    pid: int
    exit_code: int
    text: str = ""
    step: int = 0
    line: str = ""
    at_start: bool = False
    transient: bool = False

    @property
    def cause(self) -> str:
        """One line without the rank's traceback."""
        if self.text:
            return self.line or self.text.strip().splitlines()[0].removeprefix("error: ")
        rank = f"rank {self.rank} (process {self.pid})"
        if self.exit_code >= 0:
            return f"{rank} ended with status {self.exit_code} and reported nothing"
        name = signal_name(-self.exit_code)
        hint = ""
        if name == "SIGKILL":
            hint = " (by the kernel, if the machine ran out of memory)"
        return f"{rank} was killed by {name}{hint}"

    @property
    def status(self) -> int:
        return self.exit_code if self.exit_code in KNOWN else 1

    @property
    def plain(self) -> str:
        """The text without what differs between attempts: which rank was first, and addresses."""
        return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"^rank \d+: ", "", self.text))


def who_explains(failures: Failures) -> Ended:
    """The rank that left a report; else the one that failed first."""
    ends = []
    for rank, failure in sorted(failures.items(), key=lambda item: item[1].timestamp):
        end = Ended(rank, failure.pid, failure.exitcode)
        if isinstance(failure.message, dict):
            text = str(failure.message.get("message", ""))
            extra: dict[str, Any] = failure.message.get("extraInfo", {})
            step = int(extra.get("step", 0))
            at_start = bool(extra.get("at_start", step == 0))
            transient = bool(extra.get("transient"))
            end = Ended(*end[:3], text, step, str(extra.get("line", "")), at_start, transient)
        ends.append(end)
    return next((end for end in ends if end.text), ends[0])


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


@dataclass
class Restarts:
    """Decides on restarts, of which there are `most`: none after a wrong setting, wrong numbers, a
    stop, an error before the first step, or the same error twice.

    elastic: nodes may come and go. One that leaves in order, on which all ranks stop, uses up none,
    and an error after further steps, as the loss of a node is, has them counted from `most` again.
    """

    most: int
    elastic: bool = False
    furthest: int = field(default=0, init=False)  # the step of the latest error
    last: Ended | None = field(default=None, init=False)
    why_not: str = field(default="", init=False)

    def __call__(self, failures: Failures, left: int, joins: bool = False) -> int:
        """How many are left, with the one that follows now; 0: none. joins: a node waits to."""
        ended = who_explains(failures)
        if self.elastic and ended.exit_code == SAVED_AND_STOPPED:
            say(f"one {'joins' if joins else 'has left'}: all ranks save and restart")
            return left + 1
        if self.elastic and ended.step > self.furthest:
            self.furthest = ended.step
            left = self.most
        before = self.last
        self.last = ended
        reports_itself = bool(ended.text) and not ended.transient
        # After a restart it may be what the failure before it has left, as of a disk.
        is_first = before is None and ended.at_start and reports_itself
        if is_first or ended.exit_code in FAILS_AGAIN or not left:
            return 0
        if before and reports_itself and ended.plain == before.plain and ended.step <= before.step:
            again = "the same error came twice with no step between"
            self.why_not = f"; not restarted: {again} (after step {ended.step})"
            return 0
        why = "" if ended.text else f": {ended.cause}"  # its report is on the screen
        number = self.most - left + 1
        print(f"restart {number} of {self.most}{why}", file=sys.stderr, flush=True)
        return left

    def line(self, ended: Ended) -> str:
        """What to say of the last failure; "" where the rank's report on the screen says all."""
        if self.why_not or not (ended.text or ended.exit_code == SAVED_AND_STOPPED):
            return f"{ended.cause}{self.why_not}"
        return ""


def after_signal(name: str, exit_codes: Sequence[int | None]) -> tuple[int, str]:
    """(exit status, line or ""): how the ranks here ended after a signal to the launcher."""
    killed = {signal_name(-code) for code in exit_codes if code is not None and code < 0}
    if killed or not exit_codes or None in exit_codes:
        how = "their ends are unknown"
        if killed:
            how = f"ranks ended by {', '.join(sorted(killed))}"
        early = f"stopped by {name} before all ranks had saved and left ({how})"
        return 1, f"{early}; checkpoints written before are intact"
    statuses = [code for code in exit_codes if code] or [0]
    if SAVED_AND_STOPPED in statuses:
        return max(set(statuses), key=statuses.count), ""
    return next((code for code in statuses if code in KNOWN), 1), ""
