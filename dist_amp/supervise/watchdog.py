"""Which rank is dead or hangs when a collective fails, and the end of a rank that a collective would block forever."""

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

from dist_amp.errors import Failure, first_line
from dist_amp.fast import flight_recorder
from dist_amp.fast.process_group import abort_process_groups
from dist_amp.runtime.rendezvous import in_time
from dist_amp.supervise.gathering import Report, State
from dist_amp.supervise.job import Supervised
from dist_amp.supervise.liveness import Liveness, Process, process_fields, this_process
from dist_amp.supervise.stacks import main_thread_is_in
from dist_amp.supervise.stalls import Stalls
from dist_amp.supervise.verdict import ReportBoard, Verdict

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' reports after a collective has failed
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened

# What the ranks tell each other, and what it says of ranks that do not answer.
CLOSED, TIMED_OUT, LOST, FAILED = "closed", "timed out", "lost", "failed"
DIED = "died without an error: it was killed, perhaps for memory; its machine's log may say why"


class RankWatchdog:
    """Names the ranks that caused a failed collective, by what every rank reports in the shared store.

    A thread on every rank watches for a failure of any, for ranks that are gone, and for collectives on a GPU that do
    not end: under NCCL the main thread may then be blocked in any call, and no error ever comes. It reports how far its
    rank is, and ends the process, with its stacks printed if it is the one that hangs, else once the main thread has
    had the time to end by itself. end(error): reports the error, from the thread, and returns the exit status.
    """

    def __init__(self, job: Supervised, end: Callable[[BaseException], int]):
        self._job, self._end, world = job, end, job.world
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._processes: list[Process] = [this_process()]
        self._failed, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._unfinished: dict[str, tuple[str, float]] = {}  # NCCL group: its last finished collective, since when
        if world.world_size == 1 or job.store is None:
            return
        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run of the world
        self._board = ReportBoard(job.store, prefix, world.rank, world.world_size)
        # A rank that is gone is noticed before a collective times out, which may never be said under NCCL.
        self._liveness = Liveness(job.store, prefix, world.rank, 0.8 * self._timeout)
        self._processes = [Process(*json.loads(text)) for text in world.gather_texts(json.dumps(this_process()))]
        self._liveness.watch(self._processes)
        self._stalls = Stalls(job, self._board, self._processes, self._waiting, self._answer_seconds)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        if self._closed.is_set() or not self._thread.is_alive():
            return
        self._closed.set()
        if not self._failed.is_set():
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._board.report(Report("left")))
        self._thread.join(self._answer_seconds)  # the thread is left behind if the store does not answer

    # --- the thread

    def _watch(self) -> None:
        event = ""
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while not event and not self._closed.wait(POLL_SECONDS):
                event, stall = self._board.poll()
                if not event and (event := self._alarm()):
                    self._board.announce(event)
                elif not event and not self._failed.is_set():
                    with suppress(OSError):  # no room for stacks
                        self._stalls.poll(stall)
        if event:
            self._respond(event)
        elif not self._failed.is_set():
            self._stalls.close()

    def _alarm(self) -> str:
        """What this rank notices of others, or of its own collectives on a GPU; "" for nothing."""
        lost = self._liveness.lost()
        if lost is not None and not self._board.has_answered(lost):  # it has not left in order
            return CLOSED if self._processes[lost].is_dead else LOST
        if self._job.world.device.type == "cuda":
            now, finished = time.monotonic(), flight_recorder.unfinished_on_gpu()
            self._unfinished = {
                group: before if (before := self._unfinished.get(group)) and before[0] == last else (last, now)
                for group, last in finished.items()
            }
            if any(now - since > self._timeout for _, since in self._unfinished.values()):
                return TIMED_OUT
        return ""

    def _respond(self, event: str) -> None:
        """Report how far this rank is, and end the process unless its main thread ends in time."""
        verdict, hangs = Verdict([], [], by_itself=True), False
        if event != FAILED:
            try:
                if not self._failed.is_set():
                    self._report("runs")
                verdict = self._board.verdict(event == TIMED_OUT, self._processes, self._answer_seconds)
                hangs = self._job.world.rank in verdict.hanging
            except Exception:  # the store was on a rank that has ended meanwhile
                hangs = event == TIMED_OUT and self._progress(flight_recorder.dump()).waits_in is None
        # Else the main thread gets an error of its own in most cases: a peer that ends closes its connections.
        if not hangs:
            if self._ends_within(self._answer_seconds if verdict.at_fault else min(30.0, self._timeout / 2)):
                return
            with suppress(Exception):  # a GPU's queue that is blocked may go on once the collective is aborted
                in_time(self._answer_seconds, abort_process_groups)
        if self._ends_within(self._answer_seconds / 2 if not hangs else 0.0):
            return
        if hangs:
            print(f"error: rank {self._job.world.rank} hangs; its stacks:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(1)
        status = 1
        try:
            status = self._end(Failure(self._text(verdict, event)))
        finally:
            os._exit(status)

    def _ends_within(self, seconds: float) -> bool:
        """Whether the main thread has failed, or left the run, at the end of so many seconds."""
        deadline = time.monotonic() + seconds
        while not (self._failed.is_set() or self._closed.is_set()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._failed.is_set() or self._closed.is_set()

    # --- the main thread

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang, if a collective failed; any other error unchanged.

        Unchanged too if another rank has failed by itself, which reports its own error.
        """
        self._failed.set()
        if self._job.world.world_size == 1:
            return error
        collective = _is_collective(error)
        event = FAILED if not collective else TIMED_OUT if "imed out" in str(error) else CLOSED
        try:
            verdict = in_time(3 * self._answer_seconds, lambda: self._ask(event))
        except TimeoutError:
            return self._cut_off(error) if collective else error
        except Exception:  # the store died with its host
            return error
        if not verdict.at_fault:
            if collective and verdict.where and not verdict.by_itself:
                print(f"rank {self._job.world.rank}: {verdict.where}", file=sys.stderr, flush=True)
            return error
        if event == TIMED_OUT:
            self._kill(verdict.silent)
            self._wait_for_stacks(verdict.hanging)
        return Failure(f"{self._text(verdict, event)} (rank {self._job.world.rank} got: {shortened(error)})")

    def _ask(self, event: str) -> Verdict:
        self._report("failed" if event == FAILED else "waited")
        self._board.announce(event)
        if event == FAILED:
            return Verdict([], [], by_itself=True)
        return self._board.verdict(event == TIMED_OUT, self._processes, self._answer_seconds)

    # --- both

    def _report(self, state: State) -> None:
        """Report how far this rank is, and write what its flight recorder has into the run's folder."""
        folder = self._job.folder
        recorded = flight_recorder.dump() if state != "failed" else {}
        self._board.report(self._of(state, recorded))
        if recorded and folder is not None:
            with suppress(OSError):
                (folder / "flight_recorder").mkdir(exist_ok=True)
                path = folder / "flight_recorder" / f"rank{self._job.world.rank:05d}.json"
                path.write_text(json.dumps(recorded))

    def _waiting(self) -> Report:
        """What this rank is doing, while nothing has failed."""
        return self._of("runs", flight_recorder.dump())

    def _of(self, state: State, recorded: dict[str, Any]) -> Report:
        step = self._job.run.step if self._job.run is not None else -1
        return Report.of(state, step, self._progress(recorded), main_thread_is_in())

    def _progress(self, recorded: dict[str, Any]) -> flight_recorder.Progress:
        """Of the main thread: the writer's group says nothing about it."""
        writer = self._job.world.background
        return flight_recorder.progress(recorded, leave_out={writer.group_name} if writer is not None else set())

    def _text(self, verdict: Verdict, event: str) -> str:
        if not verdict.at_fault:
            return "another rank has failed, and this one's main thread did not end: its collectives were aborted"
        names = ", ".join(map(self._name, verdict.at_fault))
        what = DIED
        if event == LOST and not all(self._processes[rank].is_dead for rank in verdict.silent):
            what = (
                f"gave no sign of life for {self._liveness.limit_seconds:g} s: it is stopped, or its machine or the "
                "network to it is down"
            )
        if event == TIMED_OUT:
            what = "did not take part in a collective in time: it hangs, is stopped or its machine is down"
        where = f"; {verdict.where}" if verdict.where else ""
        stacks = f"; stacks of all ranks in {self._stalls.stacks_folder}" if self._stalls.stacks_folder else ""
        return f"rank {names} {what}{where}{stacks}"

    def _cut_off(self, error: BaseException) -> Failure:
        """For a rank that reaches neither the other ranks nor the store, and cannot know why."""
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Failure(
            f"rank {self._name(0)} and the store on its machine at {store} do not answer: it is stopped, its machine "
            f"is down, or the network to it is (rank {self._name(self._job.world.rank)} got: {shortened(error)})"
        )

    def _name(self, rank: int) -> str:
        return f"{rank} (process {self._processes[rank].pid} on {self._processes[rank].host})"

    def _wait_for_stacks(self, ranks: list[int]) -> None:
        """Until the ranks that hang have ended, as far as this one can see: the store may end with this process."""
        deadline = time.monotonic() + self._answer_seconds
        while not all(self._processes[rank].is_dead for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _kill(self, ranks: list[int]) -> None:
        """Kill hanging ranks of the same torchrun: it would wait 30 s for them, and a stopped one ignores SIGTERM."""
        for process in (self._processes[rank] for rank in ranks):
            with suppress(OSError, IndexError):
                if process.host == platform.node() and int(process_fields(process.pid)[1]) == os.getppid():
                    os.kill(process.pid, signal.SIGKILL)


def shortened(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), 200, placeholder=" ...")


def _is_collective(error: BaseException) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Timed out", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError | dist.DistError) and any(word in str(error) for word in words)
