"""torchrun in this process: when it restarts failed ranks, how it is stopped, how the ranks ended.

Only public parts of torch are used. torchrun's agent reports metrics, about ten times a second, and
an exception from a handler of them ends it in order: it stops the ranks. `Watch` is that handler.
It ends the agent after a signal, so that none interrupts the start of a rank, and in place of a
restart that would fail again. A rank that ends by itself leaves its status in torchrun's error
file, the first one with its error. What torchrun logs goes into a file beside these.
"""

import json
import logging
import os
import re
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
from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, DataError, NumericsError
from dist_amp.telemetry.startup import FAILED_AT

SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
SECONDS_TO_AGAIN = 1.0  # assumed: two SIGINT in less are one Ctrl-C, sent to the launcher twice
FAILS_AGAIN = (ConfigError.exit_code, NumericsError.exit_code)
KNOWN = (0, 1, SAVED_AND_STOPPED, DataError.exit_code, *FAILS_AGAIN)


class Report(NamedTuple):
    """How a rank ended by itself. line: its error in one line. step: how many the run had taken.

    at_start: the rank's process had taken no step. transient: another rank is the cause.
    """

    status: int = 1
    text: str = ""
    line: str = ""
    step: int = 0
    at_start: bool = False
    transient: bool = False

    @property
    def plain(self) -> str:
        """The text without what differs between attempts: which rank was first, and addresses."""
        return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"^rank \d+: ", "", self.text))


def report_from(path: Path) -> Report:
    """Read an error file, which a module that is not of this project may have written."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        message = json.loads(path.read_text())["message"]
        facts = {name: message["extraInfo"].get(name) for name in Report._fields}
        known = {name: value for name, value in facts.items() if value is not None}
        return Report(**{**known, "text": message["message"]})
    return Report()


class RestartRefused(Exception):
    """The ranks have stopped, or failed in a way that would come again."""


class Watch(metrics.MetricHandler):
    """Ends torchrun's agent after a signal, and in place of a restart that would fail again.

    elastic: nodes may come and go. Before one leaves, the ranks of all save and stop; the others
    restart.
    """

    def __init__(self, folder: Path, restarts: int, elastic: bool = False):
        self.folder = folder  # of torchrun's log and error files
        self.signal: signal.Signals | None = None
        self.why_not = ""  # there was no restart, where the report does not say it
        self._elastic = elastic
        self._restarts = self._left = restarts
        self._last: Report | None = None  # the error before the latest restart
        self._signal_at = 0.0
        self._log = TorchrunLog(folder / "torchrun.log", delay=True)
        logger = logging.getLogger("torch.distributed")
        logger.propagate = False
        logger.handlers = [self._log]

    def emit(self, metric_data: metrics.MetricData) -> None:
        """Errors: SignalException; RestartRefused."""
        name = metric_data.name
        if self.signal and (name.startswith("workers.") or name.endswith(".success")):
            raise SignalException(f"got {self.signal.name}", self.signal)
        if name.endswith(".remaining_restarts"):
            self._left = metric_data.value
        elif name.endswith((".failed", ".unhealthy")) and self._left:
            self._before_restart()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Errors: SignalException without any rank, for which the agent may wait long."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._signal_at = time.monotonic()
            if not children():
                raise SignalException(f"got {self.signal.name}", self.signal)
        elif number == signal.SIGINT and time.monotonic() - self._signal_at > SECONDS_TO_AGAIN:
            for rank in children():  # they save
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)

    def reports(self) -> list[Report]:
        """Those of this machine's ranks in the latest attempt, in the order of their ends."""
        attempts = self.folder.glob("*/attempt_*")
        latest = max(attempts, key=lambda path: path.stat().st_mtime_ns, default=self.folder)
        files = sorted(latest.glob("*/error.json"), key=lambda path: path.stat().st_mtime_ns)
        return [*map(report_from, files)]

    def _before_restart(self) -> None:
        """Errors: RestartRefused."""
        os.environ[FAILED_AT] = f"{time.time()}"  # for the ranks that are started next
        reports = self.reports()
        report = explaining(reports)
        is_first = self._left == self._restarts
        stopped = report.status == SAVED_AND_STOPPED and not self._elastic
        if stopped or report.status in FAILS_AGAIN:
            raise RestartRefused
        if report.text and not report.transient:
            # After a restart it may be what the failure before it has left, as of a disk.
            if is_first and report.at_start:
                raise RestartRefused
            last = self._last
            self._last = report
            if last and report.plain == last.plain and report.step <= last.step:
                again = "the same error came twice with no step between"
                self.why_not = f"not restarted: {again} (after step {report.step})"
                raise RestartRefused
        why = "" if reports else f": {self._log.death}"
        number = self._restarts - self._left + 1
        print(f"restart {number} of {self._restarts}{why}", file=sys.stderr, flush=True)


class TorchrunLog(logging.FileHandler):
    """torchrun's log. death: how the latest failed rank ended, as far as it says so."""

    death = "a rank ended and reported nothing"

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("failed (exitcode: %s) local_rank: %s (pid: %s)"):
            exit_code, local_rank, pid, *_ = map(str, record.args or ())
            self.death = death_of(f"local rank {local_rank} (process {pid})", int(exit_code))
        super().emit(record)


def children() -> list[int]:
    """This process's children, which are ranks. Source: proc(5)."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


def run_agent(options: Namespace, ranks: int, elastic: bool) -> tuple[int, str]:
    """Run torchrun's agent until all ranks have ended: (exit status, last line or "").

    ranks: of this machine. Errors: what torchrun itself fails with.
    """
    watch = Watch(Path(options.log_dir), options.max_restarts, elastic)
    metrics.configure(watch)
    try:
        with handle_signals(watch.on_signal, SIGNALS):
            torchrun.run(options)
    except SignalException as stopped:
        if not any(watch.folder.glob("*/attempt_*")):
            return 1, f"stopped by {stopped.sigval.name}{BEFORE_RANKS}"
        return after_signal(stopped.sigval.name, watch.reports(), ranks)
    except RestartRefused:
        report = explaining(watch.reports())
        return report.status, f"{report.line}; {watch.why_not}" if watch.why_not else ""
    except ChildFailedError as error:
        if reports := watch.reports():
            return explaining(reports).status, ""
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode in KNOWN else 1
        return status, death_of(f"rank {rank} (process {failure.pid})", failure.exitcode)
    finally:
        metrics.configure(metrics.NullMetricHandler())
    return 0, ""


def explaining(reports: Sequence[Report]) -> Report:
    """The report that says why the ranks ended: an error rather than what followed from it."""
    return min(reports, key=lambda report: (not report.text, report.transient), default=Report())


def death_of(rank: str, exit_code: int) -> str:
    if exit_code >= 0:
        return f"{rank} ended with status {exit_code} and reported nothing"
    name = f"signal {-exit_code}"
    with suppress(ValueError):  # a real-time signal
        name = signal.Signals(-exit_code).name
    hint = " (by the kernel, if the machine ran out of memory)" if name == "SIGKILL" else ""
    return f"{rank} was killed by {name}{hint}"


def after_signal(name: str, reports: Sequence[Report], ranks: int) -> tuple[int, str]:
    """(exit status, last line or ""): how the ranks of this machine ended after a signal."""
    statuses = [report.status for report in reports]
    if errors := [status for status in statuses if status not in (0, SAVED_AND_STOPPED)]:
        return errors[0], ""  # a rank has said why
    if len(statuses) == ranks:
        return max(statuses), ""
    early = f"stopped by {name} before all ranks had saved and left"
    return 1, f"{early}; checkpoints written before are intact"
