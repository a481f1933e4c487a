"""While nothing has failed: every rank says every few seconds that it lives and how far it is, and
one of those that wait for long says for whom.

A rank that is gone is noticed by its neighbour on the machine, in the process table, and by its
neighbour among all ranks, which also sees a stopped rank and a machine that is down. A rank that
has waited for long compares the reports of all ranks. If one is missing, it prints a line, and
every rank writes the stacks of its threads into the run's folder; nothing ends, because a slow rank
may yet arrive.
"""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from dist_amp.distributed.flight_recorder import Entered
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import Board, Process, Report, parsed, stacks_of_all_threads
from dist_amp.supervise.verdict import gathering, where_they_wait

BEAT_SECONDS = 5.0

# Shares of a collective's timeout, which is run.timeout_seconds, or a day where a rank may take
# long: 15 s of 300 s until a rank that waits compares the reports; 60 s until a missing one is
# named, which is at most one line per minute for a rank that is slow in every step; 150 s in a
# process's first step, which compiles, tunes kernels and fills caches. All assumed.
COMPARED = 1 / 20
NAMED = 1 / 5
NAMED_IN_FIRST_STEP = 1 / 2


class Heartbeat:
    """One rank's part; poll: about once a second, from one thread.

    report: what this rank is doing now, at the cost of a dump of the flight recorder.
    """

    def __init__(
        self, job: Job, board: Board, processes: Sequence[Process], report: Callable[[], Report]
    ):
        self._job = job
        self._board = board
        self._processes = processes
        self._report = report
        self._timeout = job.config.run.timeout_seconds
        self.limit_seconds = 0.8 * self._timeout
        self._period = min(BEAT_SECONDS, self.limit_seconds / 8)
        rank = job.world.rank
        size = job.world.world_size
        others = [(rank + distance) % size for distance in range(1, size)]
        machine = processes[rank].machine
        self._neighbour = others[0] if others else rank
        self._same_machine = [other for other in others if processes[other].machine == machine][:1]
        self._beat_at = time.monotonic() - self._period
        self._step = self._first_step = -1
        self._step_since = time.monotonic()
        self._reports: dict[int, tuple[str, float]] = {}  # of other ranks, and since when
        self._waits_in: Entered | None = None  # while this rank compares
        self._named_since = 0.0  # since when the others waited for a rank that this one named
        self._written = ""  # the line with which this rank's stacks were written
        self.stacks_folder = ""  # while a missing rank is named

    def poll(self, stall: str) -> int | None:
        """Returns a rank that is dead, or gave no sign of life for `limit_seconds`; else None.

        stall: "RANK" of the one that compares, "RANK LINE" once it has named a missing one, or "".
        """
        self._write_stacks(stall.partition(" ")[2])
        for rank in self._same_machine:
            if self._processes[rank].is_dead:
                return rank
        now = time.monotonic()
        if now - self._beat_at < self._period:
            return None
        if now - self._beat_at > 3 * self._period:
            self._reports.clear()  # this process was stopped, and the others may have been too
        self._beat_at = now
        report = self._current_report(now)
        self._board.report(report)
        self._compare(report, stall, now)
        silent = self._silent_seconds(self._neighbour, self._board.text_of(self._neighbour), now)
        return self._neighbour if silent > self.limit_seconds else None

    def close(self) -> None:
        """Say that the ranks continue, if this one has named a missing one."""
        if self._named_since:
            waited = time.monotonic() - self._named_since
            self._named_since = 0.0
            print(
                f"the ranks continue: they had waited {waited:.0f} s", file=sys.stderr, flush=True
            )

    def _current_report(self, now: float) -> Report:
        """Reads the flight recorder only once a step takes long."""
        step = self._job.steps_taken
        if step != self._step:
            self._step = step
            self._step_since = now
            if self._first_step < 0:
                self._first_step = step
        if now - self._step_since < max(1.0, COMPARED * self._timeout):
            return Report("alive", step)
        return self._report()

    def _silent_seconds(self, rank: int, text: str, now: float) -> float:
        """For how long a rank's report has not changed."""
        before, since = self._reports.get(rank, ("", now))
        if text != before:
            since = now
        self._reports[rank] = (text, since)
        return now - since

    def _compare(self, report: Report, stall: str, now: float) -> None:
        reader, _, line = stall.partition(" ")
        rank = str(self._job.world.rank)
        if reader == rank and report.waits_in != self._waits_in:
            self.close()
            self._board.change_stall(stall, "")
        elif reader == rank and not line and (line := self._line(now)):
            self._board.change_stall(stall, f"{rank} {line}")
            self._named_since = now - report.waited_seconds
            print(f"warning: {line}", file=sys.stderr, flush=True)
        is_late = report.waited_seconds >= COMPARED * report.timeout_seconds
        if not reader and is_late and self._board.change_stall("", rank):
            self._waits_in = report.waits_in

    def _line(self, now: float) -> str:
        """Who waits, for how long and in what, and who is missing; "" if nobody is, or not for long
        enough.
        """
        reports: dict[int, Report | None] = {}
        for rank, text in enumerate(self._board.texts()):
            is_silent = self._silent_seconds(rank, text, now) > 3 * self._period
            reports[rank] = None if is_silent else parsed(text)
        gathered = gathering(reports)
        if gathered is None:
            return ""
        share = NAMED_IN_FIRST_STEP if self._step <= self._first_step else NAMED
        waiting = [report for rank in gathered.waiting if (report := reports[rank]) is not None]
        is_late = any(each.waited_seconds >= share * each.timeout_seconds for each in waiting)
        # Two collectives of one number never meet, so that there is nothing to wait for.
        if not gathered.in_another and not (gathered.missing and is_late):
            return ""
        where = where_they_wait(reports, self._processes)
        folder = self._job.folder
        stacks = f"; stacks of all ranks in {folder / 'stacks'}" if folder is not None else ""
        ends = f"the run ends if this lasts for run.timeout_seconds={self._timeout:g}"
        return f"{where}{stacks}; {ends}"

    def _write_stacks(self, line: str) -> None:
        """Once for each line that names a missing rank."""
        folder = self._job.folder
        if folder is None or line == self._written:
            return
        self._written = line
        self.stacks_folder = str(folder / "stacks") if line else ""
        if line:
            rank = self._job.world.rank
            with suppress(OSError):
                (folder / "stacks").mkdir(exist_ok=True)
                text = f"{line}\n\nrank {rank} on {platform.node()}, {stacks_of_all_threads()}"
                (folder / "stacks" / f"rank{rank:05d}.txt").write_text(text)
