"""Names the rank that is missing in a collective, is dead or hangs, and ends all ranks.

A thread of each rank writes a heartbeat into the store every few seconds: the step, the collectives
that the rank has entered, the one in which it waits, and the line at which its main thread is.
- After a fifth of run.timeout_seconds in one collective, the first rank that waits there reads all
  heartbeats, and prints a line if a rank is behind or gives no sign of life.
- A rank judges by all heartbeats if it has waited for the timeout, if its collective fails, if a
  process is gone or its neighbour's heartbeat has stopped, or if it does nothing for so long while
  others wait for it. A rank without a recent heartbeat is silent; one that waits in no collective
  and has not entered one in which others wait hangs. The first verdict in the store stays.
- All ranks end by it: one that hangs prints its stacks and ends its process, the others end by the
  error of their main thread, or their process is ended if it gets none.

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
    busy_seconds,
    collectives_in_wait,
    is_kept_waiting,
    is_one_missing,
    main_thread_place,
    ranks_that_hang,
    summary_of_waits,
)

ANSWER_SECONDS = 5.0  # how long a rank that ends waits for its main thread or for other ranks
REPORT_SECONDS = 15.0  # how long a rank may take to report; one that is not the first waits 10 s
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened
BEAT_SECONDS = 5.0  # how often it writes its heartbeat, and reads its neighbour's

# Share of run.timeout_seconds until a missing rank is named: 60 s of 300 s, which is at most one
# line per minute for a rank that is slow in every step. Assumed.
NAMED = 1 / 5

# A rank does nothing if it uses less of a processor than this. Assumed: polling ten times a second
# takes less, and reading or writing at 1 MB/s more.
IDLE_SHARE = 1 / 1000

DIED = "died without an error: it was killed, or its code ended it; its machine's log may say why"
SILENT = "gave no sign of life: it is stopped or dead, or its machine or the network to it is down"
LATE = "did not take part in a collective in time: it hangs"
IDLE = "hangs: it has used no processor for run.timeout_seconds={:g}"

COLLECTIVE_ERROR = re.compile(
    "gloo|NCCL|Timed out|Application timeout|Connection closed by peer|Connection reset by peer|"
    "Broken pipe"
)


class Verdict(NamedTuple):
    """The ranks that give no sign of life, those that hang, and both in words.

    Empty if a rank has failed by an error of its own, which it reports itself.
    """

    silent: Sequence[int] = ()
    hanging: Sequence[int] = ()
    text: str = ""


class Watchdog:
    """Watches this rank and the others from a thread. end(error): report it; the exit status."""

    def __init__(self, job: Job, end: Callable[[BaseException], int]):
        world = job.world
        self._job = job
        self._rank = world.rank
        self._ranks = range(world.world_size)
        self._end = end
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._period = min(BEAT_SECONDS, self._timeout / 10)
        self._returns = threading.Event()  # the main thread has an error, or leaves the run
        self._left = threading.Event()  # it has left the run
        self._ended = threading.Event()  # and its process groups
        self._to_kill: Sequence[int] = ()  # ranks, once they have been named
        self._named: Entered | None = None  # the collective for which it has named a missing rank
        self._writes = threading.Lock()  # both threads write heartbeats
        self._last = Heartbeat(0.0)
        self._busy_seconds = self._idle_seconds = self._awake_at = 0.0

        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        group: Any = dist.group.WORLD
        store = dist.HashStore() if group is None else group.get_group_store()  # type: ignore[attr-defined]
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._processes = world.gather(Process.this())
        # Every key is there before a rank reads it: reading never waits.
        self._store.set("verdict", "")
        self._store.set(f"beat/{self._rank}", pickle.dumps(self._last))  # type: ignore[arg-type]
        world.barrier()  # after which the heartbeats' times can be compared
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        self._arm()
        self._thread.start()
        return self

    def _arm(self) -> None:
        """Have C print the stacks if a call that keeps the interpreter stops the thread, too."""
        faulthandler.dump_traceback_later(0.6 * self._timeout, file=2)

    def leave(self) -> None:
        """The main thread has left the run; from here on only its end is watched."""
        self._kill(self._to_kill)
        if not self._returns.is_set():
            self._returns.set()
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._beat(LEFT))
        self._left.set()

    def close(self) -> None:
        """Called once the process has left its groups: leaves no thread running."""
        self._ended.set()
        self._thread.join(self._answer_seconds)

    def _watch(self) -> None:
        verdict: Verdict | None = None
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while verdict is None and not self._returns.wait(POLL_SECONDS):
                self._arm()
                verdict = self._poll()
        faulthandler.cancel_dump_traceback_later()
        if verdict is not None:
            self._end_by(verdict)
        self._left.wait()
        if not self._ended.wait(self._timeout):
            where = f"rank {self._names([self._rank])} hangs at its end, in {main_thread_place()}"
            self._end_process(Verdict(hanging=[self._rank], text=where))

    # --- while nothing has failed

    def _poll(self) -> Verdict | None:
        """The verdict that ends the run, by this rank or another; None while nothing is wrong."""
        if verdict := self._store.get("verdict"):
            return Verdict(*pickle.loads(verdict))
        dead = [rank for rank in self._ranks if self._processes[rank].is_dead]
        if dead and None in self._read(dead).values():
            return self._judge()
        last = self._last
        if time.monotonic() - self._began - last.at < self._period:
            return None
        beat = self._beat()
        # Time in which this process was stopped does not count: the others may have been, too.
        seconds = min(beat.at - last.at, 2 * self._period)
        if beat.at - last.at > seconds:
            self._awake_at = beat.at
        before, self._busy_seconds = self._busy_seconds, busy_seconds()
        is_busy = abs(self._busy_seconds - before) > IDLE_SHARE * seconds
        self._idle_seconds += seconds
        if is_busy or beat.step != last.step or is_kept_waiting():
            self._idle_seconds = 0.0
        self._name_the_missing(beat)

        if beat.waits_in is None and self._idle_seconds >= self._timeout:
            is_alone = len(self._ranks) == 1
            if is_alone or beat.is_behind(collectives_in_wait(self._read())):
                return self._judge(IDLE.format(self._timeout))
        if beat.waited_seconds >= self._timeout and not beat.may_wait_long:
            return self._judge(LATE)
        since = max(beat.at - 0.8 * self._timeout, 0.0)
        neighbour = (self._rank + 1) % len(self._ranks)
        if self._awake_at < since and self._read([neighbour], since)[neighbour] is None:
            return self._judge(since=since)
        return None

    def _name_the_missing(self, beat: Heartbeat) -> None:
        """Say for whom ranks have waited for long, once per collective, on the first of them."""
        if beat.waits_in == self._named or beat.waited_seconds < NAMED * self._timeout:
            return
        beats = self._read()
        wait = next(iter(collectives_in_wait(beats)), None)
        waiting = [rank for rank, each in beats.items() if each and each.waits_in == wait]
        if wait is not None and waiting[0] == self._rank and is_one_missing(beats):
            self._named = wait
            what = "a missing rank does nothing" if beat.may_wait_long else "this lasts"
            end = f"the run ends if {what} for run.timeout_seconds={self._timeout:g}"
            where = summary_of_waits(beats, self._processes)
            print(f"warning: {where}; {end}", file=sys.stderr, flush=True)

    # --- once something has happened

    def _judge(self, fault: str = "", since: float | None = None) -> Verdict:
        """Find who is at fault and tell all ranks; returns the first verdict of any rank.

        fault: what ranks that hang did, if a rank has waited too long. since: as in `_read`.
        """
        beats = self._read(since=since)
        verdict = Verdict()
        if not any(beat and beat.state == FAILED for beat in beats.values()):
            silent = [rank for rank, beat in beats.items() if beat is None]
            hanging = ranks_that_hang(beats) if fault else []
            are_dead = all(self._processes[rank].is_dead for rank in silent)
            faults = ((silent, DIED if are_dead else SILENT), (hanging, fault))
            parts = [f"rank {self._names(ranks)} {text}" for ranks, text in faults if ranks]
            where = summary_of_waits(beats, self._processes)
            parts += [where] if where else [beats[rank].stands() for rank in hanging]
            verdict = Verdict(silent, hanging, "; ".join(parts))
        first = self._store.compare_set("verdict", "", pickle.dumps(tuple(verdict)))
        return Verdict(*pickle.loads(first))

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang; any other error as it is."""
        self._returns.set()
        is_collective = isinstance(error, RuntimeError | dist.DistError)
        is_collective = is_collective and COLLECTIVE_ERROR.search(str(error)) is not None
        if not is_collective:
            with suppress(Exception):
                in_time(self._answer_seconds, lambda: self._beat(FAILED) and self._judge())
            return error
        fault = LATE if re.search("imed out|timeout", str(error)) else ""
        short = textwrap.shorten(first_line(error), 200, placeholder=" ...")
        got = f"(rank {self._names([self._rank])} got: {short})"
        try:
            verdict = in_time(4 * self._answer_seconds, lambda: self._judge_failure(fault))
        except Exception:  # without the store it can ask no other rank, and can't know why
            store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return Transient(
                f"rank {self._names([0])} and the store on its machine at {store} do not answer: "
                f"it, its launcher or its machine has stopped, or the network is down {got}"
            )
        self._to_kill = verdict.silent
        return Transient(f"{verdict.text} {got}") if verdict.text else error

    def _judge_failure(self, fault: str) -> Verdict:
        """Judge a failed collective, once each rank has said that it lives or has failed."""
        since = self._beat(WAITED).at

        def is_known() -> bool:
            silent = [rank for rank, beat in self._read(since=since).items() if beat is None]
            is_judged = self._store.get("verdict") != b""
            return is_judged or all(self._processes[rank].is_dead for rank in silent)

        def all_know() -> bool:
            return all(beat is None or beat.state != RUNS for beat in self._read().values())

        wait_until(self._period + 2 * POLL_SECONDS, is_known)  # each rank writes a heartbeat
        verdict = self._judge(fault, since)
        if verdict.text:  # the store may end with this process
            wait_until(self._answer_seconds, all_know)
        return verdict

    def _end_by(self, verdict: Verdict) -> None:
        """End the process by a verdict, unless its main thread gets an error and ends in time."""
        with suppress(Exception):
            self._beat(WAITED)  # so that the others know that this rank knows
        seconds = self._answer_seconds  # a peer that ends closes its connections
        if not verdict.silent and not verdict.hanging:
            seconds = min(30.0, self._timeout / 2)
        elif self._rank in verdict.hanging:
            seconds = 0.0
        if not self._returns.wait(seconds):
            self._end_process(verdict)

    def _end_process(self, verdict: Verdict) -> None:
        """Report the verdict, if none has been, and end the process, even if its disk hangs."""
        if self._rank in verdict.hanging:
            print(f"error: rank {self._rank} hangs; its stacks:", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(all_threads=True)
            workers = multiprocessing.active_children()  # of the loader, which print theirs
            for worker in workers:
                os.kill(worker.pid or 0, signal.SIGUSR2)
            time.sleep(1.0 if workers else 0.0)  # or the report begins in one of their lines
        text = verdict.text or "another rank has failed, and this one's main thread did not end"
        try:
            if self._job.status is None:
                self._job.status = in_time(REPORT_SECONDS, lambda: self._end(Transient(text)))
        finally:
            self._kill(verdict.silent)  # once torchrun sees that one is dead, it ends this process
            # The others wait for this one, then still read from the store.
            if self._rank == 0 and len(self._ranks) > 1:
                time.sleep(2 * self._answer_seconds)
            os._exit(self._job.status or 1)

    def _kill(self, ranks: Sequence[int]) -> None:
        """torchrun waits 30 s for silent ranks of its machine: a stopped one ignores SIGTERM."""
        for rank in ranks:
            if self._processes[rank].state not in ("", "X", "Z"):  # "" on another machine
                with suppress(OSError):
                    os.kill(self._processes[rank].pid, signal.SIGKILL)

    # --- heartbeats

    def _beat(self, state: str = RUNS) -> Heartbeat:
        """Write this rank's heartbeat. A state other than RUNS stays."""
        with self._writes:
            last = self._last
            if last.state != RUNS:
                state = last.state
            beat = Heartbeat(time.monotonic() - self._began, self._job.steps_taken, state)
            if beat.step == last.step or state != RUNS:  # reading torch's records takes long
                saves = self._job.world.background  # the group of another thread
                beat.read(leave_out=saves.group_name if saves is not None else "")
            if beat.waits_in is not None and beat.waits_in == last.waits_in:
                seconds = min(beat.at - last.at, 2 * self._period)
                beat.waited_seconds = last.waited_seconds + seconds
            self._last = beat
            self._store.set(f"beat/{self._rank}", pickle.dumps(beat))
        return beat

    def _read(self, ranks: Sequence[int] = (), since: float | None = None) -> Any:
        """{rank: heartbeat} of these ranks, or of all; None for one that is silent or dead.

        since: when it must have given a sign of life; by default within three heartbeats.
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

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"{rank} ({self._processes[rank]})" for rank in ranks)


def wait_until(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
