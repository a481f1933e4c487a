"""Says which ranks a collective waits for while it still waits: nothing ends, and a rank that is slow may yet arrive.

A rank that has waited for long opens a round, by a key in the store that every watchdog reads each second. Every rank
answers with what it has entered; one, rank 0 unless it is silent, reads the answers. If a rank is missing, it prints a
line, and each rank writes the stacks of its threads into the run's folder.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from dist_amp.fast.flight_recorder import Entered
from dist_amp.supervise.gathering import Report, gathering, where_they_wait
from dist_amp.supervise.job import Supervised
from dist_amp.supervise.liveness import Process
from dist_amp.supervise.stacks import stacks_of_all_threads
from dist_amp.supervise.verdict import ReportBoard

# Shares of a collective's own timeout, which is run.timeout_seconds, or a day where a rank may take long: 15 s of 300 s
# until the ranks compare; 60 s until a missing one is named, which is no more than one line per minute for a rank that
# is slow in every step; 150 s in a process's first step, which compiles, tunes kernels and fills caches at a speed that
# differs between ranks. All assumed.
COMPARED, NAMED, NAMED_IN_FIRST_STEP = 1 / 20, 1 / 5, 1 / 2


class Round(NamedTuple):
    """asked: every rank answers; named: `line` has been printed; over: nothing was missing, or it has arrived."""

    number: int = 0
    phase: Literal["asked", "named", "over"] = "over"
    reader: int = 0  # the rank that reads the answers
    line: str = ""

    @classmethod
    def from_text(cls, text: str) -> "Round":
        return cls(*json.loads(text)) if text else cls()

    def to_text(self) -> str:
        return json.dumps(self)


class Stalls:
    """This rank's part in the rounds; poll: about once a second, from one thread.

    report: what this rank is doing now, at the cost of a dump of the flight recorder. answer_seconds: how long the
    others may take to answer.
    """

    def __init__(
        self,
        job: Supervised,
        board: ReportBoard,
        processes: Sequence[Process],
        report: Callable[[], Report],
        answer_seconds: float,
    ):
        self._job, self._board, self._processes, self._report = job, board, processes, report
        self._answer_seconds = answer_seconds
        self._period = max(1.0, COMPARED * job.config.run.timeout_seconds)
        self._step, self._first_step, self._looked_at = -1, -1, time.monotonic()
        self._opened = 0  # the round that this rank has opened, and for which collective
        self._waits_in: Entered | None = None
        self._answered, self._answered_at, self._captured = 0, 0.0, ""
        self._wrote, self._printed = 0, 0
        self._waited_since = 0.0
        self.stacks_folder = ""  # the folder of the ranks' stacks while a missing rank is named

    def poll(self, text: str) -> None:
        """Take part in the current round, which `text` describes; open one if this rank waits for long."""
        current = Round.from_text(text)
        self.stacks_folder = self.stacks_folder if current.phase == "named" else ""
        if current.phase == "asked":
            self._answer(current, text)
        elif current.phase == "named":
            self._write_stacks(current)
            if self._opened == current.number and self._report().waits_in != self._waits_in:
                self._board.change_round(text, current._replace(phase="over").to_text())
        else:
            if self._printed == current.number:
                self.close()
            self._look(current, text)

    def close(self) -> None:
        """Say that the ranks go on, if this one has printed which of them was missing."""
        if self._printed:
            self._printed = 0
            waited = time.monotonic() - self._waited_since
            print(f"the ranks go on: they had waited {waited:.0f} s", file=sys.stderr, flush=True)

    def _look(self, current: Round, text: str) -> None:
        """Open a round if this rank has waited for long. Dumps the recorder only while no step is finished."""
        now, step = time.monotonic(), self._job.run.step if self._job.run is not None else -1
        if step != self._step:
            self._step, self._looked_at = step, now
            self._first_step = step if self._first_step < 0 else self._first_step
        if now - self._looked_at < self._period:
            return
        self._looked_at, report = now, self._report()
        if report.waited_seconds >= COMPARED * report.timeout_seconds:
            asked = Round(current.number + 1, "asked")
            if self._board.change_round(text, asked.to_text()):
                self._opened, self._waits_in = asked.number, report.waits_in

    def _answer(self, current: Round, text: str) -> None:
        now, rank = time.monotonic(), self._job.world.rank
        if self._answered != current.number:
            self._answered, self._answered_at, self._looked_at = current.number, now, now
            self._captured = stacks_of_all_threads()
            self._board.answer(current.number, self._report())
        late = now - self._answered_at
        if current.reader == rank:
            self._read(current, text, wait=late < self._answer_seconds)
        elif late > 2 * self._answer_seconds:  # the reader does not answer: the first to say so takes its place
            self._answered_at = now
            self._board.change_round(text, current._replace(reader=rank).to_text())

    def _read(self, current: Round, text: str, wait: bool) -> None:
        """Print which ranks are missing, if any; wait: come again if a rank has not answered."""
        answers = self._board.answers(current.number)
        if wait and any(answer is None for answer in answers.values()):
            return
        line = self._line(answers)
        ended = current._replace(phase="named" if line else "over", line=line)
        if self._board.change_round(text, ended.to_text()) and line:
            self._printed = current.number
            self._waited_since = time.monotonic() - max(a.waited_seconds for a in answers.values() if a is not None)
            print(f"warning: {line}", file=sys.stderr, flush=True)

    def _line(self, answers: Mapping[int, Report | None]) -> str:
        """Who waits, for how long and in what, and who is missing; "" if nobody is, or not for long enough."""
        found, config = gathering(answers), self._job.config.run
        if found is None:
            return ""
        first = self._step <= self._first_step
        share = NAMED_IN_FIRST_STEP if first else NAMED
        waits = [answer for rank in found.waiting if (answer := answers[rank]) is not None]
        is_late = any(answer.waited_seconds >= share * answer.timeout_seconds for answer in waits)
        # Two collectives of one number never meet, so that there is nothing to wait for.
        if not found.in_another and not (found.missing and is_late):
            return ""
        where = where_they_wait(answers, self._processes)
        stacks = f"; stacks of all ranks in {self._job.folder / 'stacks'}" if self._job.folder is not None else ""
        return f"{where}{stacks}; the run ends if this lasts for run.timeout_seconds={config.timeout_seconds:g}"

    def _write_stacks(self, current: Round) -> None:
        folder, rank = self._job.folder, self._job.world.rank
        if self._wrote == current.number or folder is None:
            return
        stacks = self._captured if self._answered == current.number else stacks_of_all_threads()  # was stopped
        self._wrote = current.number
        with suppress(OSError):
            (folder / "stacks").mkdir(exist_ok=True)
            path = folder / "stacks" / f"rank{rank:05d}.txt"
            self.stacks_folder = str(folder / "stacks")
            path.write_text(f"{current.line}\n\nrank {rank} on {platform.node()}, {stacks}")
