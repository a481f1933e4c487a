"""Which rank is dead or hangs when a collective fails, and the end of a rank that a collective
would block forever.
"""

import faulthandler
import json
import os
import platform
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from dist_amp.distributed import flight_recorder
from dist_amp.distributed.process import in_time
from dist_amp.distributed.process_group import abort_process_groups
from dist_amp.errors import Failure, first_line
from dist_amp.supervise.heartbeat import Heartbeat
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    Board,
    Process,
    Report,
    State,
    parsed,
    process_fields,
    this_process,
)
from dist_amp.supervise.verdict import Verdict, common_verdict

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' reports after a collective has failed
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened

# What the ranks tell each other, and what it says of ranks that do not answer.
CLOSED = "closed"
TIMED_OUT = "timed out"
LOST = "lost"
FAILED = "failed"
DIED = "died without an error: it was killed, perhaps for memory; its machine's log may say why"

COLLECTIVE_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Timed out",
    "Connection reset by peer",
    "Broken pipe",
)


class Watchdog:
    """Names the ranks that caused a failed collective, by what every rank reports in the shared
    store.

    A thread on every rank watches for a failure of any, for ranks that are gone, and for
    collectives on a GPU that do not end: under NCCL the main thread may then be blocked in any
    call, and no error ever comes. It reports how far its rank is, and ends the process, with its
    stacks printed if it is the one that hangs, else once the main thread has had the time to end by
    itself. end(error): reports the error, from the thread, and returns the exit status.
    """

    def __init__(self, job: Job, end: Callable[[BaseException], int]):
        world = job.world
        self._job = job
        self._end = end
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._unfinished: dict[str, tuple[str, float]] = {}  # see _blocked_on_gpu
        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        self._board = Board(job.store, prefix, world.rank, world.world_size)
        texts = world.gather_texts(json.dumps(this_process()))
        self._processes = [Process(*json.loads(text)) for text in texts]
        self._heartbeat = Heartbeat(job, self._board, self._processes, self._report_alive)
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
                event, stall = self._board.poll()
                if not event and (event := self._alarm(stall)):
                    self._board.announce(event)
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
                return CLOSED if self._processes[lost].is_dead else LOST
        is_blocked = self._job.world.device.type == "cuda" and self._blocked_on_gpu()
        return TIMED_OUT if is_blocked else ""

    def _blocked_on_gpu(self) -> bool:
        """Whether an NCCL group with an unfinished collective has finished none for as long as the
        time-out.
        """
        now = time.monotonic()
        unfinished = {}
        for group, last in flight_recorder.unfinished_on_gpu().items():
            before = self._unfinished.get(group)
            is_same = before is not None and before[0] == last
            unfinished[group] = before if before is not None and is_same else (last, now)
        self._unfinished = unfinished
        return any(now - since > self._timeout for _, since in unfinished.values())

    def _respond(self, event: str) -> None:
        """Report how far this rank is, and end the process unless its main thread ends in time."""
        verdict = Verdict([], [], by_itself=True)
        hangs = False
        if event != FAILED:
            try:
                if not self._failed.is_set():
                    self._report("runs")
                verdict = self._common_verdict(event)
                hangs = self._job.world.rank in verdict.hanging
            except Exception:  # the store was on a rank that has ended meanwhile
                waits_in = self._progress(flight_recorder.dump()).waits_in
                hangs = event == TIMED_OUT and waits_in is None
        if hangs:
            if not self._ends_within(0.0):
                self._end_with_stacks()
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

    def _end_with_stacks(self) -> None:
        rank = self._job.world.rank
        print(f"error: rank {rank} hangs; its stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    def _ends_within(self, seconds: float) -> bool:
        """Whether the main thread has failed, or left the run, at the end of so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            if self._failed.is_set() or self._closed.is_set():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)

    # --- the main thread

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang, if a collective failed; any other
        error unchanged.

        Unchanged too if another rank has failed by itself, which reports its own error.
        """
        self._failed.set()
        collective = is_collective(error)
        event = FAILED
        if collective:
            event = TIMED_OUT if "imed out" in str(error) else CLOSED
        try:
            verdict = in_time(3 * self._answer_seconds, lambda: self._ask(event))
        except TimeoutError:
            return self._cut_off(error) if collective else error
        except Exception:  # the store died with its host
            return error
        rank = self._job.world.rank
        if not verdict.at_fault:
            if collective and verdict.where and not verdict.by_itself:
                print(f"rank {rank}: {verdict.where}", file=sys.stderr, flush=True)
            return error
        if event == TIMED_OUT:
            self._kill(verdict.silent)
            self._wait_for_stacks(verdict.hanging)
        return Failure(f"{self._text(verdict, event)} (rank {rank} got: {shortened(error)})")

    def _ask(self, event: str) -> Verdict:
        if event == FAILED:
            self._report("failed")
            self._board.announce(event)
            return Verdict([], [], by_itself=True)
        self._report("waited")
        self._board.announce(event)
        return self._common_verdict(event)

    # --- both

    def _common_verdict(self, event: str) -> Verdict:
        timed_out = event == TIMED_OUT
        return common_verdict(self._board, timed_out, self._processes, self._answer_seconds)

    def _report(self, state: State) -> None:
        """Answer a failure, and write what the flight recorder has into the run's folder."""
        recorded = flight_recorder.dump() if state != "failed" else {}
        self._board.report(Report.of(state, self._job.steps_taken, self._progress(recorded)))
        if recorded and self._job.folder is not None:
            folder = self._job.folder / "flight_recorder"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                path = folder / f"rank{self._job.world.rank:05d}.json"
                path.write_text(json.dumps(recorded))

    def _report_alive(self) -> Report:
        """What this rank is doing, while nothing has failed."""
        progress = self._progress(flight_recorder.dump())
        return Report.of("alive", self._job.steps_taken, progress)

    def _progress(self, recorded: dict[str, Any]) -> flight_recorder.Progress:
        """Of the main thread: the writer's group says nothing about it."""
        writer = self._job.world.background
        leave_out: set[str] = {writer.group_name} if writer is not None else set()
        return flight_recorder.progress(recorded, leave_out)

    def _text(self, verdict: Verdict, event: str) -> str:
        if not verdict.at_fault:
            return (
                "another rank has failed, and this one's main thread did not end: its collectives "
                "were aborted"
            )
        what = DIED
        if event == LOST and not all(self._processes[rank].is_dead for rank in verdict.silent):
            what = (
                f"gave no sign of life for {self._heartbeat.limit_seconds:g} s: it is stopped, or "
                "its machine or the network to it is down"
            )
        if event == TIMED_OUT:
            what = (
                "did not take part in a collective in time: it hangs, is stopped or its machine "
                "is down"
            )
        names = ", ".join(map(self._name, verdict.at_fault))
        parts = [f"rank {names} {what}"]
        if verdict.where:
            parts.append(verdict.where)
        if self._heartbeat.stacks_folder:
            parts.append(f"stacks of all ranks in {self._heartbeat.stacks_folder}")
        return "; ".join(parts)

    def _cut_off(self, error: BaseException) -> Failure:
        """For a rank that reaches neither the other ranks nor the store, and cannot know why."""
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Failure(
            f"rank {self._name(0)} and the store on its machine at {store} do not answer: it is "
            "stopped, its machine is down, or the network to it is (rank "
            f"{self._name(self._job.world.rank)} got: {shortened(error)})"
        )

    def _name(self, rank: int) -> str:
        return f"{rank} (process {self._processes[rank].pid} on {self._processes[rank].host})"

    def _wait_for_stacks(self, ranks: list[int]) -> None:
        """Until the ranks that hang have ended, as far as this one can see: the store may end with
        this process.
        """
        deadline = time.monotonic() + self._answer_seconds
        while time.monotonic() < deadline:
            if all(self._processes[rank].is_dead for rank in ranks):
                return
            time.sleep(0.1)

    def _kill(self, ranks: list[int]) -> None:
        """Kill hanging ranks of the same torchrun: it would wait 30 s for them, and a stopped one
        ignores SIGTERM.
        """
        for process in (self._processes[rank] for rank in ranks):
            if process.host != platform.node():
                continue
            with suppress(OSError, IndexError):
                if int(process_fields(process.pid)[1]) == os.getppid():
                    os.kill(process.pid, signal.SIGKILL)


def shortened(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), 200, placeholder=" ...")


def is_collective(error: BaseException) -> bool:
    """Whether a failed collective raised it."""
    if not isinstance(error, RuntimeError | dist.DistError):
        return False
    return any(word in str(error) for word in COLLECTIVE_ERRORS)
