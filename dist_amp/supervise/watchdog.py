"""Who is missing in a collective, dead or hangs; the end of a rank that would wait forever."""

import faulthandler
import json
import os
import platform
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from dist_amp.distributed import flight_recorder
from dist_amp.distributed.flight_recorder import Entered
from dist_amp.distributed.process import in_time
from dist_amp.distributed.process_group import abort_process_groups
from dist_amp.errors import Failure, first_line
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    Board,
    Process,
    Report,
    State,
    Verdict,
    common_verdict,
    gathering,
    parsed,
    where_they_wait,
)

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' reports after a collective has failed
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened
BEAT_SECONDS = 5.0  # how often it reports

# Shares of a collective's timeout, which is run.timeout_seconds, or a day where a rank may take
# long: 15 s of 300 s until a rank that waits compares the reports; 60 s until a missing one is
# named, which is at most one line per minute for a rank that is slow in every step; 150 s in a
# process's first step, which compiles, tunes kernels and fills caches. All assumed.
COMPARED = 1 / 20
NAMED = 1 / 5
NAMED_IN_FIRST_STEP = 1 / 2

DIED = "died without an error: it was killed, perhaps for memory; its machine's log may say why"
SILENT = (
    "gave no sign of life for {:g} s: it is stopped, or its machine or the network to it is down"
)
LATE = "did not take part in a collective in time: it hangs, is stopped or its machine is down"

# What the ranks tell each other: the event.
CLOSED = "closed"
TIMED_OUT = "timed out"
LOST = "lost"
FAILED = "failed"

COLLECTIVE_ERROR = re.compile(
    "gloo|NCCL|Timed out|Connection closed by peer|Connection reset by peer|Broken pipe"
)


class Heartbeat:
    """While nothing has failed: reports that this rank lives, and says who is missing.

    A dead rank is noticed by its neighbour on the machine, a silent one by its neighbour among all.
    A rank that has waited for long compares all reports: if one is missing, it prints a line, and
    every rank writes its threads' stacks. Nothing ends: a slow rank may yet arrive.
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
        self._rank = job.world.rank
        size = job.world.world_size
        others = [(self._rank + distance) % size for distance in range(1, size)]
        machine = processes[self._rank].machine
        self._neighbour = others[0] if others else self._rank
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
        """About once a second: a rank that is dead, or silent for `limit_seconds`; else None.

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
            waited = f"{time.monotonic() - self._named_since:.0f} s"
            self._named_since = 0.0
            print(f"the ranks continue: they had waited {waited}", file=sys.stderr, flush=True)

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
        rank = str(self._rank)
        replace = self._board.store.compare_set
        if reader == rank and report.waits_in != self._waits_in:
            self.close()
            replace("stall", stall, "")
        elif reader == rank and not line and (line := self._line(now)):
            replace("stall", stall, f"{rank} {line}")
            self._named_since = now - report.waited_seconds
            print(f"warning: {line}", file=sys.stderr, flush=True)
        is_late = report.waited_seconds >= COMPARED * report.timeout_seconds
        if not reader and is_late and replace("stall", "", rank) == rank.encode():
            self._waits_in = report.waits_in

    def _line(self, now: float) -> str:
        """Who waits in what and who is missing; "" if nobody is, or not for long enough."""
        reports: dict[int, Report | None] = {}
        for rank, text in enumerate(self._board.texts()):
            is_silent = self._silent_seconds(rank, text, now) > 3 * self._period
            reports[rank] = None if is_silent else parsed(text)
        gathered = gathering(reports)
        if gathered is None:
            return ""
        share = NAMED_IN_FIRST_STEP if self._step <= self._first_step else NAMED
        is_late = any(
            each.waited_seconds >= share * each.timeout_seconds for each in gathered.reports
        )
        # Two collectives of one number never meet, so that there is nothing to wait for.
        if not gathered.in_another and not (gathered.missing and is_late):
            return ""
        stacks = ""
        if self._job.folder is not None:
            stacks = f"; stacks of all ranks in {self._job.folder / 'stacks'}"
        ends = f"the run ends if this lasts for run.timeout_seconds={self._timeout:g}"
        return f"{where_they_wait(reports, self._processes)}{stacks}; {ends}"

    def _write_stacks(self, line: str) -> None:
        """Once for each line that names a missing rank."""
        if self._job.folder is None or line == self._written:
            return
        self._written = line
        folder = self._job.folder / "stacks"
        self.stacks_folder = str(folder) if line else ""
        with suppress(OSError):
            if line:
                folder.mkdir(exist_ok=True)
                names = [f"{each.ident or 0:#018x} {each.name}" for each in threading.enumerate()]
                about = [line, "", f"{self._processes[self._rank]}, threads:", *names, ""]
                with (folder / f"rank{self._rank:05d}.txt").open("w") as file:
                    print(*about, sep="\n", file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)


class Watchdog:
    """Names the ranks that caused a failed collective, by what every rank reports in the store.

    A thread on every rank watches for a failure of any, for ranks that are gone, and for
    collectives on a GPU that do not end: under NCCL no error ever comes. It ends the process, with
    its stacks printed if it is the one that hangs, else once the main thread has had the time to
    end by itself. end(error): reports the error, from the thread, and returns the exit status.
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
        self._unfinished: dict[str, tuple[str, float]] = {}  # see _blocked_on_gpu
        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        store = dist.PrefixStore(prefix, job.store)  # type: ignore[attr-defined, arg-type]
        self._board = Board(store, world.rank, world.world_size)
        texts = world.gather_texts(json.dumps(Process.this()))
        self._processes = [Process(*json.loads(text)) for text in texts]
        report = partial(self._own_report, "alive")
        self._heartbeat = Heartbeat(job, self._board, self._processes, report)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching; the thread is left behind if the store does not answer."""
        if not self._thread.is_alive():
            return
        self._closed.set()
        if not self._failed.is_set():
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._board.report(Report("left")))
        self._thread.join(self._answer_seconds)

    # --- the thread

    def _watch(self) -> None:
        event = ""
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while not event and not self._closed.wait(POLL_SECONDS):
                texts = self._board.store.multi_get(["event", "stall"])
                event, stall = (text.decode() for text in texts)
                if not event and (event := self._alarm(stall)):
                    self._announce(event)
        if event:
            self._respond(event)
        elif not self._failed.is_set():
            self._heartbeat.close()

    def _alarm(self, stall: str) -> str:
        """What this rank notices of others, or of its collectives on a GPU; "" for nothing."""
        lost = self._heartbeat.poll(stall)
        if lost is not None:
            report = parsed(self._board.text_of(lost))
            if report is None or report.state == "alive":  # it has not left in order
                return LOST
        is_blocked = self._job.world.device.type == "cuda" and self._blocked_on_gpu()
        return TIMED_OUT if is_blocked else ""

    def _blocked_on_gpu(self) -> bool:
        """Whether an NCCL group has an unfinished collective, and finished none for the timeout."""
        now = time.monotonic()
        unfinished = {}
        for group, last in flight_recorder.unfinished_on_gpu().items():
            before, since = self._unfinished.get(group, (last, now))
            unfinished[group] = (last, since if before == last else now)
        self._unfinished = unfinished
        return any(now - since > self._timeout for _, since in unfinished.values())

    def _respond(self, event: str) -> None:
        """Report how far this rank is, and end the process unless its main thread ends in time."""
        verdict = Verdict([], [], by_itself=True)
        hangs = False
        if event != FAILED:
            try:
                if not self._failed.is_set():
                    self._answer("runs")
                verdict = self._common_verdict(event)
                hangs = self._rank in verdict.hanging
            except Exception:  # the store was on a rank that has ended meanwhile
                waits_in = self._own_report("runs").waits_in
                hangs = event == TIMED_OUT and waits_in is None
        if hangs:
            if not self._ends_within(0.0):
                print(f"error: rank {self._rank} hangs; its stacks:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
            return
        # The main thread gets an error in most cases: a peer that ends closes its connections.
        seconds = self._answer_seconds if verdict.at_fault else min(30.0, self._timeout / 2)
        if self._ends_within(seconds):
            return
        # A GPU's queue that is blocked may continue once the collective is aborted.
        with suppress(Exception):
            in_time(self._answer_seconds, abort_process_groups)
        if self._ends_within(self._answer_seconds / 2):
            return
        status = 1
        try:
            status = self._end(Failure(self._text(verdict, event)))
        finally:
            os._exit(status)

    def _ends_within(self, seconds: float) -> bool:
        """Whether the main thread has failed, or left the run, at the end of so many seconds."""
        return _is_true_within(seconds, lambda: self._failed.is_set() or self._closed.is_set())

    # --- the main thread

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang, if a collective failed.

        Any other error unchanged, or if another rank has failed by itself and reports its error.
        """
        self._failed.set()
        is_collective = isinstance(error, RuntimeError | dist.DistError)
        is_collective = is_collective and COLLECTIVE_ERROR.search(str(error)) is not None
        event = FAILED
        if is_collective:
            event = TIMED_OUT if "imed out" in str(error) else CLOSED
        short = textwrap.shorten(first_line(error), 200, placeholder=" ...")
        try:
            verdict = in_time(3 * self._answer_seconds, lambda: self._ask(event))
        except TimeoutError:
            if not is_collective:
                return error
            # It reaches neither the other ranks nor the store, and can't know why.
            store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return Failure(
                f"rank {self._name(0)} and the store on its machine at {store} do not answer: it "
                "is stopped, its machine is down, or the network to it is (rank "
                f"{self._name(self._rank)} got: {short})"
            )
        except Exception:  # the store died with its host
            return error
        if not verdict.at_fault:
            if is_collective and verdict.where and not verdict.by_itself:
                print(f"rank {self._rank}: {verdict.where}", file=sys.stderr, flush=True)
            return error
        if event == TIMED_OUT:
            self._kill(verdict.silent)
            # The store may end with this process: let the ranks that hang print their stacks.
            hanging = [self._processes[rank] for rank in verdict.hanging]
            _is_true_within(self._answer_seconds, lambda: all(each.is_dead for each in hanging))
        return Failure(f"{self._text(verdict, event)} (rank {self._rank} got: {short})")

    def _ask(self, event: str) -> Verdict:
        if event == FAILED:
            self._answer("failed")
            self._announce(event)
            return Verdict([], [], by_itself=True)
        self._answer("waited")
        self._announce(event)
        return self._common_verdict(event)

    def _kill(self, ranks: list[int]) -> None:
        """Silent ranks of this torchrun: it waits 30 s for them; a stopped one ignores SIGTERM."""
        for process in (self._processes[rank] for rank in ranks):
            with suppress(OSError, IndexError):
                if process.host == platform.node() and int(process.fields()[1]) == os.getppid():
                    os.kill(process.pid, signal.SIGKILL)

    # --- both

    def _announce(self, event: str) -> None:
        """Ask every rank to answer; the first of several events stays."""
        self._board.store.compare_set("event", "", event)

    def _common_verdict(self, event: str) -> Verdict:
        is_timeout = event == TIMED_OUT
        return common_verdict(self._board, is_timeout, self._processes, self._answer_seconds)

    def _own_report(self, state: State, recorded: dict[str, Any] | None = None) -> Report:
        """What the main thread does, of which the writer's group says nothing."""
        if recorded is None:
            recorded = flight_recorder.dump()
        writer = self._job.world.background
        leave_out: set[str] = {writer.group_name} if writer is not None else set()
        progress = flight_recorder.progress(recorded, leave_out)
        return Report.of(state, self._job.steps_taken, progress)

    def _answer(self, state: State) -> None:
        """Answer a failure, and write what the flight recorder has into the run's folder."""
        recorded = flight_recorder.dump() if state != "failed" else {}
        self._board.report(self._own_report(state, recorded))
        if recorded and self._job.folder is not None:
            folder = self._job.folder / "flight_recorder"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                (folder / f"rank{self._rank:05d}.json").write_text(json.dumps(recorded))

    def _text(self, verdict: Verdict, event: str) -> str:
        if not verdict.at_fault:
            return (
                "another rank has failed, and this one's main thread did not end: its collectives "
                "were aborted"
            )
        what = DIED
        if event == LOST and not all(self._processes[rank].is_dead for rank in verdict.silent):
            what = SILENT.format(self._heartbeat.limit_seconds)
        if event == TIMED_OUT:
            what = LATE
        parts = [f"rank {', '.join(map(self._name, verdict.at_fault))} {what}"]
        if verdict.where:
            parts.append(verdict.where)
        if self._heartbeat.stacks_folder:
            parts.append(f"stacks of all ranks in {self._heartbeat.stacks_folder}")
        return "; ".join(parts)

    def _name(self, rank: int) -> str:
        return f"{rank} ({self._processes[rank]})"


def _is_true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
