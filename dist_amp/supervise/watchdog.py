"""Who is missing in a collective, dead or hangs; the end of a rank that would wait forever.

Docs: docs/debugging.md
"""

import faulthandler
import json
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from dist_amp.distributed import flight_recorder
from dist_amp.distributed.process import in_time
from dist_amp.distributed.process_group import A_DAY
from dist_amp.errors import Transient, first_line
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    Board,
    Process,
    Report,
    Reports,
    State,
    Verdict,
    busy_seconds,
    common_verdict,
    have_parted,
    is_kept_waiting,
    is_true_within,
    main_thread_is_in,
    ranks_behind,
    where_they_wait,
)

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' reports after a collective has failed
REPORT_SECONDS = 15.0  # how long a rank may take to report; one that is not the first waits 10 s
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened
BEAT_SECONDS = 5.0  # how often it reports

# Shares of run.timeout_seconds: 15 s of 300 s until a rank that waits compares the reports; 60 s
# until a missing one is named, which is at most one line per minute for a rank that is slow in
# every step; 150 s until the end of a process's first step, which compiles, tunes kernels and fills
# caches. All assumed.
COMPARED = 1 / 20
NAMED = 1 / 5
NAMED_IN_FIRST_STEP = 1 / 2

# A rank does nothing if it uses less of a processor than this. Assumed: polling ten times a second
# takes less, and reading or writing at 1 MB/s more.
IDLE_SHARE = 1 / 1000

# What has failed, and what the ranks at fault did. CLOSED: a connection, as that of a dead rank.
CLOSED, TIMED_OUT, LOST, SILENT, FAILED = "closed", "timed out", "lost", "silent", "failed"
IDLE = "idle"  # the only rank
DIED = "died without an error: it was killed, or its code ended it; its machine's log may say why"
FAULTS = {
    CLOSED: DIED,
    LOST: DIED,
    SILENT: "gave no sign of life: it is stopped, or its machine or the network to it is down",
    IDLE: "hangs: it has used no processor for run.timeout_seconds={:g}",
    TIMED_OUT: (
        "did not take part in a collective in time: it hangs, is stopped or its machine is down"
    ),
}

COLLECTIVE_ERROR = re.compile(
    "gloo|NCCL|Timed out|Application timeout|Connection closed by peer|Connection reset by peer|"
    "Broken pipe"
)


class Heartbeat:
    """While nothing has failed: reports that this rank lives, and says who is missing.

    A dead rank is noticed by its neighbour on the machine, a silent one by its neighbour among all.
    A rank that has waited for long compares all reports: if one is missing, it prints a line, and
    every rank writes its threads' stacks. A rank that the others wait for, or the only one, hangs
    if it does nothing for run.timeout_seconds. The store's `stall` is "RANK" of the one that
    compares, "RANK LINE" once it has printed the line.
    """

    def __init__(
        self, job: Job, board: Board, processes: Sequence[Process], report: Callable[[], Report]
    ):
        self._job = job
        self._board = board
        self._processes = processes
        self._report = report
        self._timeout = job.config.run.timeout_seconds
        self._period = min(BEAT_SECONDS, self._timeout / 10)
        self._rank = job.world.rank
        size = job.world.world_size
        others = [(self._rank + distance) % size for distance in range(1, size)]
        machine = processes[self._rank].machine
        self._neighbours = others[:1]
        self._same_machine = [other for other in others if processes[other].machine == machine][:1]
        self._beat_at = time.monotonic() - self._period
        self._step = -1
        self._has_stepped = False
        self._busy_seconds = 0.0
        self._idle_since = self._beat_at
        self._beats: dict[int, tuple[str, float]] = {}  # of other ranks, and since when
        self._waits: Report | None = None  # while this rank compares: how it waited then
        self._named_since = 0.0  # since when the others waited for a rank that this one named
        self._written = ""  # the line with which this rank's stacks were written

    def poll(self, stall: str) -> tuple[str, int]:
        """About once a second: LOST, SILENT, TIMED_OUT or IDLE, and the rank; else ("", 0)."""
        self._write_stacks(stall.partition(" ")[2])
        for rank in self._same_machine:
            if self._processes[rank].is_dead:
                return LOST, rank
        now = time.monotonic()
        if now - self._beat_at < self._period:
            return "", 0
        step = self._job.steps_taken
        busy_before, self._busy_seconds = self._busy_seconds, busy_seconds()
        least = IDLE_SHARE * (now - self._beat_at)
        is_busy = step != self._step or abs(self._busy_seconds - busy_before) > least
        if is_busy or is_kept_waiting():
            self._idle_since = now
        if now - self._beat_at > 3 * self._period:
            self._beats.clear()  # this process was stopped, and the others may have been too
            self._idle_since = now
        self._beat_at = now
        self.arm()
        report = Report("alive", step)
        if step == self._step:  # reading torch's records is too slow for every beat
            report = replace(self._report(), idle_seconds=now - self._idle_since)
        self._has_stepped |= 0 <= self._step < step
        self._step = step
        self._board.beat(report, now)
        if not self._neighbours and report.idle_seconds >= self._timeout:
            return IDLE, self._rank
        for rank in self._compare(report, stall, now):
            return TIMED_OUT, rank
        for rank in self._neighbours:
            (text,) = self._board.beats([rank])
            if self._silent_seconds(rank, text, now) > 0.8 * self._timeout:
                return SILENT, rank
        return "", 0

    def arm(self) -> None:
        """Have C print the stacks if a call that keeps the interpreter stops this thread too."""
        faulthandler.dump_traceback_later(0.6 * self._timeout, file=2)

    def close(self) -> None:
        """Say that the ranks continue, if this one has named a missing one."""
        if self._named_since:
            waited = time.monotonic() - self._named_since
            print(f"the ranks continue: they had waited {waited:.0f} s", file=sys.stderr)
            self._named_since = 0.0

    def _silent_seconds(self, rank: int, text: str, now: float) -> float:
        before, since = self._beats.get(rank, ("", now))
        if text != before:
            since = now
        self._beats[rank] = (text, since)
        return now - since

    def _compare(self, report: Report, stall: str, now: float) -> list[int]:
        """The ranks that hang, by the reports of all, if it is this rank that compares them."""
        reader, _, line = stall.partition(" ")
        rank = str(self._rank)
        store = self._board.store
        if not reader and report.waited_seconds >= COMPARED * self._timeout:
            self._waits = report
            store.compare_set("stall", "", rank)
        if reader != rank:
            return []
        if self._waits and report.waits_in != self._waits.waits_in:
            self.close()
            store.compare_set("stall", stall, "")
            return []
        reports = {}
        for other, text in enumerate(self._board.beats()):
            is_silent = self._silent_seconds(other, text, now) > 3 * self._period
            reports[other] = None if is_silent else Report.from_text(text.partition(" ")[2])
        if not line and (line := self._line(reports)):
            store.compare_set("stall", stall, f"{rank} {line}")
            self._named_since = now - report.waited_seconds
            print(f"warning: {line}", file=sys.stderr, flush=True)
        if report.waited_seconds < self._timeout:
            return []
        answered = {rank: report for rank, report in reports.items() if report is not None}
        return [
            rank
            for rank in ranks_behind(answered)
            if not answered[rank].waits_in and answered[rank].idle_seconds >= self._timeout
        ]

    def _line(self, reports: Reports) -> str:
        """Who waits in what and who is missing; "" if nobody is, or not for long enough."""
        answered = {rank: report for rank, report in reports.items() if report is not None}
        share = NAMED if self._has_stepped else NAMED_IN_FIRST_STEP
        is_late = any(
            report.waited_seconds >= share * self._timeout for report in answered.values()
        )
        is_missing = len(answered) < len(reports) or bool(ranks_behind(answered))
        # Two collectives of one number never meet, so that there is nothing to wait for.
        if not have_parted(reports) and not (is_missing and is_late):
            return ""
        stacks = ""
        if self._job.folder is not None:
            stacks = f"; stacks of all ranks in {self._job.folder / 'stacks'}"
        what = "this lasts"
        if self._waits and self._waits.timeout_seconds >= A_DAY.total_seconds():
            what = "a missing rank does nothing"  # it may work for longer
        ends = f"the run ends if {what} for run.timeout_seconds={self._timeout:g}"
        return f"{where_they_wait(reports, self._processes)}{stacks}; {ends}"

    def _write_stacks(self, line: str) -> None:
        if self._job.folder is None or line == self._written:
            return
        self._written = line
        folder = self._job.folder / "stacks"
        with suppress(OSError):
            if line:
                folder.mkdir(exist_ok=True)
                with (folder / f"rank{self._rank:05d}.txt").open("w") as file:
                    print(f"{line}\n\n{self._processes[self._rank]}", file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)


class Watchdog(AbstractContextManager["Watchdog"]):
    """Names the ranks that caused a failed collective, by what every rank reports in the store.

    A thread watches for a failure of any rank, for ranks that are gone, and for collectives on a
    GPU that do not end; it ends the process unless the main thread does so in time. end(error):
    reports the error and returns the exit status.
    """

    def __init__(self, job: Job, end: Callable[[BaseException], int]):
        world = job.world
        self._job = job
        self._rank = world.rank
        self._end = end
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._has_ended = threading.Event()
        self._silent: list[int] = []  # ranks to kill once they have been named
        self._at_the_end: threading.Thread | None = None
        self._unfinished: dict[Any, float] = {}  # since when: see _blocked_on_gpu
        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        store = dist.PrefixStore(prefix, job.store)  # type: ignore[attr-defined, arg-type]
        self._board = Board(store, world.rank, world.world_size)
        self._processes = world.gather(Process.this())
        self._heartbeat = Heartbeat(
            job, self._board, self._processes, lambda: self._report("alive")
        )
        self._heartbeat.arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        """Stop watching; the thread is left behind if the store does not answer."""
        self._kill(self._silent)
        if not self._thread.is_alive():
            return
        self._closed.set()
        if not self._failed.is_set():
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._board.answer(Report("left")))
        self._thread.join(self._answer_seconds)

    def time_the_end(self) -> None:
        """End this process if it does not leave its groups within run.timeout_seconds."""

        def wait() -> None:
            if not self._has_ended.wait(self._timeout):
                where = main_thread_is_in()
                error = Transient(f"rank {self._name(self._rank)} hangs at its end, in {where}")
                self._end_hanging(error)

        self._at_the_end = threading.Thread(target=wait, daemon=True)
        self._at_the_end.start()

    def close(self) -> None:
        """Called once the process has left its groups: leaves no thread running."""
        self._has_ended.set()
        if self._at_the_end is not None:
            self._at_the_end.join(self._answer_seconds)

    def _watch(self) -> None:
        event = ""
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while not event and not self._closed.wait(POLL_SECONDS):
                texts = self._board.store.multi_get(["event", "stall"])
                event, stall = (text.decode() for text in texts)
                if not event and (event := self._alarm(stall)):
                    self._board.announce(event)
        faulthandler.cancel_dump_traceback_later()
        if event:
            self._respond(event)
        elif not self._failed.is_set():
            self._heartbeat.close()

    def _alarm(self, stall: str) -> str:
        """What this rank notices of others, or of its collectives on a GPU; "" for nothing."""
        event, rank = self._heartbeat.poll(stall)
        if event and self._board.answers()[rank] is None:  # nor has it left in order
            return event
        is_blocked = self._job.world.device.type == "cuda" and self._blocked_on_gpu()
        return TIMED_OUT if is_blocked else ""

    def _blocked_on_gpu(self) -> bool:
        """Whether an NCCL group has an unfinished collective, and finished none for the timeout."""
        now = time.monotonic()
        unfinished = flight_recorder.unfinished_on_gpu().items()
        self._unfinished = {last: self._unfinished.get(last, now) for last in unfinished}
        return any(now - since > self._timeout for since in self._unfinished.values())

    def _respond(self, event: str) -> None:
        """Report how far this rank is, and end the process unless its main thread ends in time."""
        verdict = Verdict()
        hangs = False
        if event != FAILED:
            try:
                if not self._failed.is_set():
                    self._answer("runs")
                verdict = self._common_verdict(event)
                hangs = self._rank in verdict.hanging
            except Exception:  # the store was on a rank that has ended meanwhile
                hangs = event == TIMED_OUT and self._report("runs").waits_in is None
                if hangs:
                    verdict = Verdict(hanging=[self._rank], where=f"in {main_thread_is_in()}")
        error = Transient(self._text(verdict, event))
        if hangs:
            if not self._ends_within(0.0):
                self._end_hanging(error)
            return
        # Else a silent rank may be ending by itself.
        if event in (TIMED_OUT, SILENT) and verdict.silent and not self._failed.is_set():
            # Named first: once torchrun sees that a rank is dead, it ends this one.
            with suppress(TimeoutError):  # its disk hangs
                self._job.status = in_time(REPORT_SECONDS, lambda: self._end(error))
            self._kill(verdict.silent)
        # The main thread gets an error in most cases: a peer that ends closes its connections.
        seconds = self._answer_seconds if verdict.at_fault else min(30.0, self._timeout / 2)
        if not self._ends_within(seconds):
            self._end_by(error)

    def _end_hanging(self, error: Transient) -> None:
        print(f"error: rank {self._rank} hangs; its stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for worker in multiprocessing.active_children():  # of the loader, which print theirs
            os.kill(worker.pid or 0, signal.SIGUSR2)
        self._end_by(error)

    def _end_by(self, error: Transient) -> None:
        """Report the error, if none has been, and end the process, even if its disk hangs."""
        status = self._job.status or 1
        self._job.raises = False  # nobody is left to show it
        try:
            if self._job.status is None:
                status = in_time(REPORT_SECONDS, lambda: self._end(error))
        finally:
            # The others wait for this one, then still read from the store.
            if self._rank == 0 and len(self._processes) > 1:
                time.sleep(2 * self._answer_seconds)
            os._exit(status)

    def _ends_within(self, seconds: float) -> bool:
        return is_true_within(seconds, lambda: self._failed.is_set() or self._closed.is_set())

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang; any other error as it is."""
        self._failed.set()
        is_collective = isinstance(error, RuntimeError | dist.DistError)
        is_collective = is_collective and COLLECTIVE_ERROR.search(str(error)) is not None
        event = FAILED
        if is_collective:
            event = TIMED_OUT if re.search("imed out|timeout", str(error)) else CLOSED
        short = textwrap.shorten(first_line(error), 200, placeholder=" ...")
        try:
            verdict = in_time(3 * self._answer_seconds, lambda: self._ask(event))
        except Exception as unanswered:
            if not is_collective:
                return error
            why = "or its launcher died"  # and the store with them
            if isinstance(unanswered, TimeoutError):
                # It reaches neither the other ranks nor the store, and can't know why.
                store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                why = f"and the store on its machine at {store} do not answer: it is stopped, "
                why += "its machine is down, or the network to it is"
            got = f"(rank {self._name(self._rank)} got: {short})"
            return Transient(f"rank {self._name(0)} {why} {got}")
        if not verdict.at_fault:
            if verdict.where:
                print(f"rank {self._rank}: {verdict.where}", file=sys.stderr, flush=True)
            return error
        if event == TIMED_OUT:
            self._silent = verdict.silent
            # The store may end with this process: let the ranks that hang print their stacks.
            hanging = [self._processes[rank] for rank in verdict.hanging]
            is_true_within(self._answer_seconds, lambda: all(each.is_dead for each in hanging))
        return Transient(f"{self._text(verdict, event)} (rank {self._rank} got: {short})")

    def _ask(self, event: str) -> Verdict:
        self._answer("failed" if event == FAILED else "waited")
        self._board.announce(event)
        if event == FAILED:
            return Verdict()
        return self._common_verdict(event)

    def _kill(self, ranks: list[int]) -> None:
        """Silent ranks of this torchrun: it waits 30 s for them; a stopped one ignores SIGTERM."""
        for process in (self._processes[rank] for rank in ranks):
            if process.state_and_parent[1] == str(os.getppid()):
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    def _common_verdict(self, event: str) -> Verdict:
        is_timeout = event in (TIMED_OUT, IDLE)
        return common_verdict(self._board, is_timeout, self._processes, self._answer_seconds)

    def _report(self, state: State) -> Report:
        """What the main thread does: the one that saves has a group of its own."""
        leave_out = ""
        writer = self._job.world.background
        if writer is not None and main_thread_is_in("checkpoint writer"):
            leave_out = writer.group_name
        return Report.read(state, self._job.steps_taken, flight_recorder.dump(), leave_out)

    def _answer(self, state: State) -> None:
        """Answer a failure, and write what the flight recorder has into the run's folder."""
        self._board.answer(self._report(state))
        if state != "failed" and self._job.folder is not None:
            folder = self._job.folder / "flight_recorder"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / f"rank{self._rank:05d}.json").write_text(
                    json.dumps(flight_recorder.dump())
                )

    def _text(self, verdict: Verdict, event: str) -> str:
        if not verdict.at_fault:
            return "another rank has failed, and this one's main thread did not end"
        names = ", ".join(map(self._name, verdict.at_fault))
        where = f"; {verdict.where}" if verdict.where else ""
        return f"rank {names} {FAULTS[event].format(self._timeout)}{where}"

    def _name(self, rank: int) -> str:
        return f"{rank} ({self._processes[rank]})"
