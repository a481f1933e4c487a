"""Runs torchrun in this process: decides on restarts, handles signals, reads how the ranks ended.

torchrun's agent restarts all ranks if one fails, for whatever reason. Ten times a second it also
reports metrics to a handler. If the handler raises, the agent stops the ranks and ends. `Watch` is
that handler: it raises after a signal, and before a restart that would fail again. A rank that is
not killed writes its exit status to its error file, and the first to fail also its error message.
torchrun's own log goes to a file in the same folder. Only public APIs of torch are used.
"""

import json
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch.distributed import run as torchrun
from torch.distributed.elastic.metrics import api as metrics
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from dist_amp.distributed.signals import BEFORE_RANKS, STOP_SIGNALS, handle_signals
from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, NumericsError
from dist_amp.telemetry.startup import FAILED_AT

SAME_CTRL_C_SECONDS = 1.0  # SIGINTs closer than this are one Ctrl-C, received twice; assumed
FAILS_AGAIN = (ConfigError.exit_code, NumericsError.exit_code)  # even after a restart


class Report(NamedTuple):
    """How a rank ended, from its error file. The defaults are for a file that can't be read."""

    status: int = 1  # exit status
    text: str = ""  # the error message, if this rank was the first to fail
    at_start: bool = False  # the rank had taken no step
    transient: bool = False  # another rank is the cause


def read_report(path: Path) -> Report:
    """Read an error file; a module started with -m may have written it in another format."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        message = json.loads(path.read_text())["message"]
        facts = {**message["extraInfo"], "text": message["message"]}
        return Report(**{name: facts[name] for name in Report._fields if name in facts})
    return Report()


class RestartRefused(Exception):
    """Raised in place of a restart: the ranks saved and stopped, or would fail again."""


class Watch(metrics.MetricHandler):
    """Ends torchrun's agent after a signal, and before a restart that would fail again.

    folder: for torchrun's log and error files. elastic: nodes may join and leave. Before a node
    leaves, the ranks of all nodes save and stop, and the other nodes restart.
    """

    def __init__(self, folder: Path, restarts: int, elastic: bool = False):
        self.folder = folder
        self._signal: signal.Signals | None = None
        self._signal_at = 0.0
        self._elastic = elastic
        self._restarts = self._restarts_left = restarts
        logger = logging.getLogger("torch.distributed")
        logger.propagate = False
        logger.handlers = [logging.FileHandler(folder / "torchrun.log", delay=True)]

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Receive one of the agent's metrics. Raises SignalException or RestartRefused."""
        if self._signal is not None:
            raise SignalException(f"got {self._signal.name}", self._signal)
        name = metric_data.name
        if name.endswith(".remaining_restarts"):
            self._restarts_left = metric_data.value
        elif name.endswith((".failed", ".unhealthy")) and self._restarts_left:
            self._check_restart()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note a signal for `emit`; a second Ctrl-C kills the ranks. Raises SignalException."""
        if self._signal is None:
            self._signal = signal.Signals(number)
            self._signal_at = time.monotonic()
            if not children():  # then the agent may wait long before it calls `emit`
                raise SignalException(f"got {self._signal.name}", self._signal)
        elif number == signal.SIGINT and time.monotonic() - self._signal_at > SAME_CTRL_C_SECONDS:
            for rank in children():  # they are still saving
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)

    def reports(self) -> list[Report]:
        """The reports of this machine's ranks in the latest attempt, ordered by when they ended."""
        attempts = self.folder.glob("*/attempt_*")
        latest = max(attempts, key=lambda path: path.stat().st_mtime_ns, default=self.folder)
        files = sorted(latest.glob("*/error.json"), key=lambda path: path.stat().st_mtime_ns)
        return [read_report(file) for file in files]

    def _check_restart(self) -> None:
        """Announce the restart that comes next. Raises RestartRefused if it would not help."""
        os.environ[FAILED_AT] = f"{time.time()}"  # for the ranks that are started next
        report = first_cause(self.reports())
        has_stopped = report.status == SAVED_AND_STOPPED and not self._elastic
        # In a restarted attempt, an error at the start may stem from the earlier failure.
        is_first = self._restarts_left == self._restarts
        fails_at_start = report.text and report.at_start and not report.transient and is_first
        if has_stopped or fails_at_start or report.status in FAILS_AGAIN:
            raise RestartRefused
        cause = "" if report.text else ": a rank ended without a report; did memory run out?"
        number = self._restarts - self._restarts_left + 1
        print(f"restart {number} of {self._restarts}{cause}", file=sys.stderr, flush=True)


def children() -> list[int]:
    """The process ids of this process's children, which are the ranks. Source: proc(5)."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


def run_agent(options: Namespace, ranks: int, elastic: bool) -> tuple[int, str]:
    """Run this machine's ranks: (exit status, last line or ""). Raises torchrun's errors."""
    watch = Watch(Path(options.log_dir), options.max_restarts, elastic)
    metrics.configure(watch)
    try:
        with handle_signals(watch.on_signal, (*STOP_SIGNALS, signal.SIGQUIT)):
            torchrun.run(options)
    except SignalException as stopped:
        if not any(watch.folder.glob("*/attempt_*")):
            return 1, f"stopped by {stopped.sigval.name}{BEFORE_RANKS}"
        return after_signal(stopped.sigval.name, watch.reports(), ranks)
    except RestartRefused:
        return first_cause(watch.reports()).status, ""
    except ChildFailedError as error:
        if reports := watch.reports():
            return first_cause(reports).status, ""
        rank, failure = error.get_first_failure()
        line = f"rank {rank} (process {failure.pid}) "
        if failure.exitcode >= 0:
            return failure.exitcode, f"{line}ended with status {failure.exitcode} and no report"
        hint = " (by the kernel, if memory ran out)" if failure.exitcode == -9 else ""
        return 1, f"{line}was killed by {failure.signal_name()}{hint}"
    finally:
        metrics.configure(metrics.NullMetricHandler())
    return 0, ""


def first_cause(reports: Sequence[Report]) -> Report:
    """The report that says why the ranks ended: a cause rather than its consequences."""
    return min(reports, key=lambda report: (not report.text, report.transient), default=Report())


def after_signal(name: str, reports: Sequence[Report], ranks: int) -> tuple[int, str]:
    """Returns this machine's (exit status, last line or "") after a signal to the launcher."""
    statuses = [report.status for report in reports]
    errors = [status for status in statuses if status not in (0, SAVED_AND_STOPPED)]
    if errors or len(statuses) == ranks:
        return max(errors or statuses), ""  # the ranks have printed why
    early = f"stopped by {name} before all ranks had saved and exited"
    return 1, f"{early}; earlier checkpoints are intact"
