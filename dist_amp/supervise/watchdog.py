"""Finds and reports the rank that is dead, hangs or is missing from a collective; ends all ranks.

A collective's own timeout does not say which rank is missing. So a thread of each rank writes a
heartbeat to torch's store every few seconds (rank_reports.py): the step, the collectives that the
rank has entered, the one it waits in, and the line of code that its main thread is at.
- Warning: after a fifth of run.timeout_seconds in one collective, the ranks that wait there read
  all heartbeats, and the first of these ranks prints which ranks are missing.
- Verdict: which ranks are silent (no recent heartbeat), and which hang (they wait in no collective,
  and have not entered one that others wait in). A rank judges, by all heartbeats, if it has waited
  for the whole timeout or its collective fails. It also judges if a process is dead, the next rank
  is silent, or it is idle while others wait for it. The store's first verdict counts for all ranks.
- End: a rank that hangs prints its stacks and exits. On the other ranks the collective then raises
  in the main thread; if it does not, the watchdog's thread ends the process.

Docs: docs/debugging.md
"""

import faulthandler
import multiprocessing
import os
import pickle
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from dist_amp.distributed.process import in_time
from dist_amp.errors import Transient, first_line
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    FAILED,
    LEFT,
    RUNS,
    WAITED,
    Entered,
    Heartbeat,
    Process,
    awaited_collectives,
    busy_seconds,
    is_kept_waiting,
    is_rank_missing,
    main_thread_place,
    ranks_that_hang,
    summary_of_waits,
)

ANSWER_SECONDS = 5.0  # how long a rank that ends waits for its main thread or for other ranks
REPORT_SECONDS = 15.0  # how long a report may take; a rank that is not the first sleeps 10 s in it
POLL_SECONDS = 1.0  # between two looks for a verdict or a dead process
BEAT_SECONDS = 5.0  # between two heartbeats of a rank

# The warning comes after this share of run.timeout_seconds: 60 s of 300 s, so a rank that is slow
# in every step causes at most one line per minute. Assumed.
WARN_AFTER = 1 / 5

# A rank is idle if it uses less than this share of one CPU core. Assumed: a loop that polls ten
# times a second uses less, and reading or writing at 1 MB/s uses more.
IDLE_SHARE = 1 / 1000

DIED = "died without an error: it was killed, or its code ended it; its machine's log may say why"
SILENT = "gave no sign of life: it is stopped or dead, or its machine or the network to it is down"
LATE = "did not take part in a collective in time: it hangs"
IDLE = "hangs: it has used no CPU time for run.timeout_seconds={:g}"

COLLECTIVE_ERROR = re.compile(
    "gloo|NCCL|Timed out|Application timeout|Connection closed by peer|Connection reset by peer|"
    "Broken pipe"
)


class Verdict(NamedTuple):
    """The silent ranks, the ranks that hang, and the message about them.

    Empty if a rank has failed by its own error, which that rank reports.
    """

    silent: Sequence[int] = ()
    hanging: Sequence[int] = ()
    text: str = ""


class Watchdog:
    """Watches all ranks from this one. end(error): reports the error; returns the exit status."""

    def __init__(self, job: Job, end: Callable[[BaseException], int]):
        world = job.world
        self._job = job
        self._rank = world.rank
        self._ranks = range(world.world_size)
        self._end = end
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._period = min(BEAT_SECONDS, self._timeout / 10)
        self._leaving = threading.Event()  # the main thread has an error, or is done with the run
        self._left_run = threading.Event()  # the main thread has closed the run
        self._left_groups = threading.Event()  # the main thread has destroyed the process groups
        self._to_kill: Sequence[int] = ()  # silent ranks, once they have been reported
        self._warned_of: Entered | None = None  # the collective of the latest warning
        self._write_lock = threading.Lock()  # held by the thread that writes a heartbeat
        self._last = Heartbeat(0.0)  # this rank's latest
        # CPU seconds of this rank; seconds without any; when it last ran again after a stop.
        self._busy_seconds = self._idle_seconds = self._woke_at = 0.0

        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        group: Any = dist.group.WORLD
        store = dist.HashStore() if group is None else group.get_group_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._processes = world.gather(Process.this())
        # Set every key before any rank reads it, because reading a missing key would wait.
        self._store.set("verdict", "")
        self._store.set(f"beat/{self._rank}", pickle.dumps(self._last))  # type: ignore[arg-type]
        world.barrier()  # so that all ranks' clocks start now, and heartbeats' times are comparable
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        self._arm()
        self._thread.start()
        return self

    def _arm(self) -> None:
        """Postpone faulthandler's print, by a C thread, which runs even if a call holds the GIL."""
        faulthandler.dump_traceback_later(0.6 * self._timeout, file=2)

    def leave(self) -> None:
        """Called by the main thread after the run or an error; then only its exit is watched."""
        self._kill(self._to_kill)
        if not self._leaving.is_set():
            self._leaving.set()
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._beat(LEFT))
        self._left_run.set()

    def close(self) -> None:
        """Called once the process has left its process groups; ends the thread."""
        self._left_groups.set()
        self._thread.join(self._answer_seconds)

    def _watch(self) -> None:
        verdict: Verdict | None = None
        with suppress(Exception):  # the store is gone: torchrun has ended, and ends this process
            while verdict is None and not self._leaving.wait(POLL_SECONDS):
                self._arm()
                verdict = self._poll()
        faulthandler.cancel_dump_traceback_later()
        if verdict is not None:
            self._act_on(verdict)
        self._left_run.wait()
        if not self._left_groups.wait(self._timeout):
            text = f"rank {self._describe([self._rank])} hangs at its end, in {main_thread_place()}"
            self._end_process(Verdict(hanging=[self._rank], text=text))

    # --- while nothing has failed

    def _poll(self) -> Verdict | None:
        """The verdict of this or another rank; None while nothing is wrong."""
        if verdict := self._store.get("verdict"):
            return Verdict(*pickle.loads(verdict))
        dead = [rank for rank in self._ranks if self._processes[rank].is_dead]
        if dead and None in self._read(dead).values():  # else their last state is LEFT or FAILED
            return self._judge()
        last = self._last
        if time.monotonic() - self._began - last.at < self._period:
            return None
        beat = self._beat()
        # Don't count time in which this process was stopped: other ranks may have been stopped too.
        seconds = min(beat.at - last.at, 2 * self._period)
        if beat.at - last.at > seconds:
            self._woke_at = beat.at
        before, self._busy_seconds = self._busy_seconds, busy_seconds()
        is_busy = abs(self._busy_seconds - before) > IDLE_SHARE * seconds
        self._idle_seconds += seconds
        if is_busy or beat.step != last.step or is_kept_waiting():
            self._idle_seconds = 0.0
        self._warn_of_missing(beat)

        if beat.waits_in is None and self._idle_seconds >= self._timeout:
            is_alone = len(self._ranks) == 1
            if is_alone or beat.is_behind(awaited_collectives(self._read())):
                return self._judge(IDLE.format(self._timeout))
        if beat.waited_seconds >= self._timeout and not beat.may_wait_long:
            return self._judge(LATE)
        # Judge if the next rank has been silent for 0.8 of the timeout, all of which this rank ran.
        since = max(beat.at - 0.8 * self._timeout, 0.0)
        neighbour = (self._rank + 1) % len(self._ranks)
        if self._woke_at < since and self._read([neighbour], since)[neighbour] is None:
            return self._judge(since=since)
        return None

    def _warn_of_missing(self, beat: Heartbeat) -> None:
        """Print once which ranks are missing from a collective, on the first rank that waits."""
        if beat.waits_in == self._warned_of or beat.waited_seconds < WARN_AFTER * self._timeout:
            return
        beats = self._read()
        wait = next(iter(awaited_collectives(beats)), None)
        waiting = [rank for rank, each in beats.items() if each and each.waits_in == wait]
        if wait is not None and waiting[0] == self._rank and is_rank_missing(beats):
            self._warned_of = wait
            what = "a missing rank does nothing" if beat.may_wait_long else "this lasts"
            end = f"the run ends if {what} for run.timeout_seconds={self._timeout:g}"
            waits = summary_of_waits(beats, self._processes)
            print(f"warning: {waits}; {end}", file=sys.stderr, flush=True)

    # --- after a failure

    def _judge(self, fault: str = "", since: float | None = None) -> Verdict:
        """Write a verdict to the store, unless there is one; returns the verdict in the store.

        fault: the message for ranks that hang; "": look for silent ranks only. since: as in _read.
        """
        beats = self._read(since=since)
        verdict = Verdict()
        if not any(beat and beat.state == FAILED for beat in beats.values()):
            silent = [rank for rank, beat in beats.items() if beat is None]
            hanging = ranks_that_hang(beats) if fault else []
            are_dead = all(self._processes[rank].is_dead for rank in silent)
            faults = ((silent, DIED if are_dead else SILENT), (hanging, fault))
            parts = [f"rank {self._describe(ranks)} {text}" for ranks, text in faults if ranks]
            waits = summary_of_waits(beats, self._processes)
            parts += [waits] if waits else [beats[rank].location() for rank in hanging]
            verdict = Verdict(silent, hanging, "; ".join(parts))
        first = self._store.compare_set("verdict", "", pickle.dumps(tuple(verdict)))
        return Verdict(*pickle.loads(first))

    def explain(self, error: BaseException) -> BaseException:
        """The error to report; for a failed collective, a Transient with the ranks at fault."""
        self._leaving.set()
        is_collective = isinstance(error, RuntimeError | dist.DistError)
        is_collective = is_collective and COLLECTIVE_ERROR.search(str(error)) is not None
        if not is_collective:
            with suppress(Exception):
                in_time(self._answer_seconds, lambda: self._beat(FAILED) and self._judge())
            return error
        fault = LATE if re.search("imed out|timeout", str(error)) else ""
        short = textwrap.shorten(first_line(error), 200, placeholder=" ...")
        got = f"(rank {self._describe([self._rank])} got: {short})"
        try:
            verdict = in_time(4 * self._answer_seconds, lambda: self._judge_failure(fault))
        except Exception:  # the store is gone, and with it the heartbeats
            store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return Transient(
                f"rank {self._describe([0])} and the store on its machine at {store} do not "
                f"answer: it, its launcher or its machine has stopped, or the network is down {got}"
            )
        self._to_kill = verdict.silent
        return Transient(f"{verdict.text} {got}") if verdict.text else error

    def _judge_failure(self, fault: str) -> Verdict:
        """Judge after a failed collective, once each rank has had time for another heartbeat."""
        since = self._beat(WAITED).at

        def all_answered() -> bool:
            silent = [rank for rank, beat in self._read(since=since).items() if beat is None]
            is_judged = self._store.get("verdict") != b""
            return is_judged or all(self._processes[rank].is_dead for rank in silent)

        def all_have_verdict() -> bool:
            return all(beat is None or beat.state != RUNS for beat in self._read().values())

        wait_until(self._period + 2 * POLL_SECONDS, all_answered)
        verdict = self._judge(fault, since)
        if verdict.text:  # the store may end with this process: first let all read the verdict
            wait_until(self._answer_seconds, all_have_verdict)
        return verdict

    def _act_on(self, verdict: Verdict) -> None:
        """End the process, unless its main thread gets an error and leaves the run in time."""
        with suppress(Exception):
            self._beat(WAITED)  # tells other ranks that this one has the verdict
        seconds = self._answer_seconds  # in which the rank at fault exits, and collectives fail
        if not verdict.silent and not verdict.hanging:  # another rank reports its own error
            seconds = min(30.0, self._timeout / 2)
        elif self._rank in verdict.hanging:
            seconds = 0.0
        if not self._leaving.wait(seconds):
            self._end_process(verdict)

    def _end_process(self, verdict: Verdict) -> None:
        """Report the verdict, unless an error was reported before, and always end the process."""
        if self._rank in verdict.hanging:
            print(f"error: rank {self._rank} hangs; its stacks:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            workers = multiprocessing.active_children()  # loader workers print stacks on SIGUSR2
            for worker in workers:
                os.kill(worker.pid or 0, signal.SIGUSR2)
            time.sleep(1.0 if workers else 0.0)  # so that the report does not mix with their lines
        text = verdict.text or "another rank has failed, and this one's main thread did not end"
        try:
            if self._job.status is None:
                self._job.status = in_time(REPORT_SECONDS, lambda: self._end(Transient(text)))
        finally:
            self._kill(verdict.silent)  # after the report: torchrun ends all ranks once one is dead
            # Rank 0 may serve the store, from which other ranks still read the verdict.
            if self._rank == 0 and len(self._ranks) > 1:
                time.sleep(2 * self._answer_seconds)
            os._exit(self._job.status or 1)

    def _kill(self, ranks: Sequence[int]) -> None:
        """Kill these ranks if they run here: torchrun would wait 30 s for a stopped process."""
        for rank in ranks:
            if self._processes[rank].state not in ("", "X", "Z"):  # "": on another machine
                with suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGKILL)

    # --- heartbeats

    def _beat(self, state: str = RUNS) -> Heartbeat:
        """Write this rank's heartbeat. A state other than RUNS is final."""
        with self._write_lock:
            last = self._last
            if last.state != RUNS:
                state = last.state
            beat = Heartbeat(time.monotonic() - self._began, self._job.steps_taken, state)
            # Reading torch's record takes up to 84 ms, so not after a step: then nothing hangs.
            if beat.step == last.step or state != RUNS:
                saves = self._job.world.background  # used by the thread that saves, not by this one
                beat.read(leave_out=saves.group_name if saves is not None else "")
            if beat.waits_in is not None and beat.waits_in == last.waits_in:
                seconds = min(beat.at - last.at, 2 * self._period)
                beat.waited_seconds = last.waited_seconds + seconds
            self._last = beat
            self._store.set(f"beat/{self._rank}", pickle.dumps(beat))
        return beat

    def _read(self, ranks: Sequence[int] = (), since: float | None = None) -> Any:
        """{rank: latest heartbeat} of these ranks, or of all. None if its state is RUNS, but the
        rank is dead or the heartbeat is from before `since`, by default three heartbeats ago.
        """
        if since is None:
            since = time.monotonic() - self._began - 3 * (self._period + POLL_SECONDS)
        ranks = ranks or self._ranks
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        beats: dict[int, Heartbeat | None] = {}
        for rank, beat in zip(ranks, map(pickle.loads, texts), strict=True):
            is_silent = beat.at < since or self._processes[rank].is_dead
            beats[rank] = None if is_silent and beat.state == RUNS else beat
        return beats

    def _describe(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"{rank} ({self._processes[rank]})" for rank in ranks)


def wait_until(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
