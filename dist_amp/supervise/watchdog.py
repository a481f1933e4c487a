"""Who is missing in a collective, dead or hangs; the end of a rank that would wait forever.

Docs: docs/debugging.md

A thread of each rank writes a heartbeat into the store every few seconds: the step, the collectives
that the rank has entered, the one in which it waits, and the line at which its main thread is.
- A rank that has waited for a fifth of run.timeout_seconds reads all heartbeats. If a rank is
  behind or gives no sign of life, it prints a line, and every rank writes its threads' stacks.
- The run ends if a collective fails or takes longer than the timeout, if a process is dead or its
  heartbeat stops, or if a rank that the others wait for, or the only one, does nothing for so long.
  Who notices it sets "event" in the store; every rank answers once, with what it does, and by the
  answers each says which ranks are silent, and which hang: behind in a collective, waiting in none.
- A rank that hangs prints its stacks. The first one to report prints the error; the thread ends
  the process unless the main thread does so in time.
"""

import faulthandler
import json
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

from dist_amp.distributed import flight_recorder
from dist_amp.distributed.process import in_time
from dist_amp.errors import Transient, first_line
from dist_amp.supervise.lifecycle import Job
from dist_amp.supervise.rank_reports import (
    Entered,
    Heartbeat,
    Process,
    busy_seconds,
    collectives_in_wait,
    is_kept_waiting,
    is_one_missing,
    main_thread_place,
    ranks_at_fault,
    where_it_stands,
    where_they_wait,
)

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' answers after a failure
REPORT_SECONDS = 15.0  # how long a rank may take to report; one that is not the first waits 10 s
POLL_SECONDS = 1.0  # how often a rank asks whether anything has happened
BEAT_SECONDS = 5.0  # how often it writes its heartbeat, and reads its neighbour's

# Share of run.timeout_seconds until a missing rank is named: 60 s of 300 s, which is at most one
# line per minute for a rank that is slow in every step. Assumed.
NAMED = 1 / 5

# A rank does nothing if it uses less of a processor than this. Assumed: polling ten times a second
# takes less, and reading or writing at 1 MB/s more.
IDLE_SHARE = 1 / 1000

# What has happened, and what the ranks at fault did.
FAILED, DEAD, SILENT, LATE, IDLE = "failed", "dead", "silent", "late", "idle"
FAULTS = {
    DEAD: "died without an error: it was killed, or its code ended it; its machine's log may say "
    "why",
    SILENT: "gave no sign of life: it is stopped, or its machine or the network to it is down",
    LATE: "did not take part in a collective in time: it hangs, is stopped or its machine is down",
    IDLE: "hangs: it has used no processor for run.timeout_seconds={:g}",
}

COLLECTIVE_ERROR = re.compile(
    "gloo|NCCL|Timed out|Application timeout|Connection closed by peer|Connection reset by peer|"
    "Broken pipe"
)


class Verdict(NamedTuple):
    """Who is at fault: ranks that do not answer, and ranks that hang; none if one has failed."""

    event: str
    silent: Sequence[int] = ()
    hanging: Sequence[int] = ()
    where: str = ""  # they wait, in one line

    @property
    def at_fault(self) -> list[int]:
        return sorted([*self.silent, *self.hanging])


class Watchdog:
    """Watches this rank and the others from a thread. end(error): report it; the exit status."""

    def __init__(self, job: Job, end: Callable[[BaseException], int]):
        world = job.world
        self._job = job
        self._rank = world.rank
        self._end = end
        self._timeout = job.config.run.timeout_seconds
        self._answer_seconds = min(ANSWER_SECONDS, self._timeout / 4)
        self._period = min(BEAT_SECONDS, self._timeout / 10)
        self._returns = threading.Event()  # the main thread has an error, or leaves the run
        self._left = threading.Event()  # it has left the run
        self._ended = threading.Event()  # and its process groups
        self._silent: Sequence[int] = ()  # ranks to kill once they have been named
        self._step = -1
        self._busy_seconds = 0.0
        self._waits_in: Entered | None = None
        self._named: Heartbeat | None = None  # with which this rank has named a missing one
        self._written = ""  # the line with which this rank's stacks were written

        prefix = f"dist_amp/watchdog/{world.from_main(str(time.time_ns()))}"  # unique to this run
        group: Any = dist.group.WORLD
        store = dist.HashStore() if group is None else group.get_group_store()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._processes = world.gather(Process.this())
        machine = self._processes[self._rank].machine
        self._ranks = range(world.world_size)
        self._same_machine = [r for r in self._ranks if self._processes[r].machine == machine]
        # Every key is there before a rank reads it: reading never waits.
        for key in ("event", "line", f"answer/{self._rank}"):
            self._store.set(key, "")
        self._write(Heartbeat(0.0))
        world.barrier()  # after which the heartbeats' times can be compared
        self._began = time.monotonic()
        self._beat_at = self._awake_since = self._busy_at = self._waits_since = self._began
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> "Watchdog":
        self._arm()
        self._thread.start()
        return self

    def leave(self) -> None:
        """The main thread has left the run; from here on only its end is watched."""
        self._kill(self._silent)
        if not self._returns.is_set():
            self._returns.set()
            with suppress(Exception):  # the store is dead, or does not answer
                in_time(self._answer_seconds, lambda: self._answer("left"))
        self._left.set()

    def close(self) -> None:
        """Called once the process has left its groups: leaves no thread running."""
        self._ended.set()
        self._thread.join(self._answer_seconds)

    def _watch(self) -> None:
        event = ""
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while not event and not self._returns.wait(POLL_SECONDS):
                event = self._poll()
        faulthandler.cancel_dump_traceback_later()
        if event:
            self._respond(event)
        self._left.wait()
        if not self._ended.wait(self._timeout):
            where = f"rank {self._name(self._rank)} hangs at its end, in {main_thread_place()}"
            self._end_hanging(Transient(where))

    # --- while nothing has failed

    def _poll(self) -> str:
        """What has happened, as far as this rank knows or notices; "" for nothing."""
        event, line = (text.decode() for text in self._store.multi_get(["event", "line"]))
        self._write_stacks(line)
        if event:
            return event
        for rank in self._same_machine:
            if self._processes[rank].is_dead and self._answers(rank)[rank] is None:
                return DEAD
        now = time.monotonic()
        pause = now - self._beat_at
        if pause < self._period:
            return ""
        self._beat_at = now
        if pause > 3 * self._period:  # it was stopped, and the others may have been, too
            self._awake_since = self._busy_at = self._waits_since = now
        self._arm()
        beat = self._beat(now, pause)
        self._name_the_missing(beat, line)
        is_idle = beat.waits_in is None and beat.idle_seconds >= self._timeout
        is_alone = len(self._ranks) == 1
        if is_idle and (is_alone or beat.is_behind(collectives_in_wait(self._read()))):
            return IDLE
        if now - self._waits_since >= self._timeout and not beat.may_wait_long:
            return LATE  # on a GPU, whose host sees no error
        neighbour = (self._rank + 1) % len(self._ranks)
        silent_since = max(self._began + self._read(neighbour)[neighbour].at, self._awake_since)
        is_silent = now - silent_since > 0.8 * self._timeout
        return SILENT if is_silent and self._answers(neighbour)[neighbour] is None else ""

    def _arm(self) -> None:
        """Have C print the stacks if a call that keeps the interpreter stops this thread, too."""
        faulthandler.dump_traceback_later(0.6 * self._timeout, file=2)

    def _beat(self, now: float, pause: float) -> Heartbeat:
        """Write this rank's heartbeat, `pause` seconds after the one before."""
        beat = Heartbeat(now - self._began, step=self._job.steps_taken)
        busy_before, self._busy_seconds = self._busy_seconds, busy_seconds()
        is_busy = abs(self._busy_seconds - busy_before) > IDLE_SHARE * pause
        if is_busy or beat.step != self._step or is_kept_waiting():
            self._busy_at = now
        if beat.step == self._step:  # reading torch's records is too slow for every heartbeat
            beat = self._heartbeat()
            beat.idle_seconds = now - self._busy_at
        if beat.waits_in != self._waits_in:
            self._waits_in = beat.waits_in
            self._waits_since = now
        self._step = beat.step
        self._write(beat)
        return beat

    def _name_the_missing(self, beat: Heartbeat, line: str) -> None:
        """If this rank has waited for long, say for whom, once for all ranks; and its end."""
        if self._named is not None and beat.waits_in != self._named.waits_in:
            waited = self._named.waited_seconds + beat.at - self._named.at
            print(f"the ranks continue: they had waited {waited:.0f} s", file=sys.stderr)
            self._named = None
            self._store.set("line", "")
        if line or beat.waited_seconds < NAMED * self._timeout:
            return
        beats: dict[int, Heartbeat | None] = {}
        for rank, last in self._read().items():
            beats[rank] = last if beat.at - last.at <= 3 * self._period else None
        if not is_one_missing(beats):
            return
        stacks = ""
        if self._job.folder is not None:
            stacks = f"; stacks of all ranks in {self._job.folder / 'stacks'}"
        what = "this lasts"
        if beat.may_wait_long:
            what = "a missing rank does nothing"  # it may work for longer
        where = where_they_wait(beats, self._processes)
        line = f"{where}{stacks}; the run ends if {what} for run.timeout_seconds={self._timeout:g}"
        own = f"{self._rank} {line}"
        if self._store.compare_set("line", "", own).decode() == own:
            self._named = beat
            print(f"warning: {line}", file=sys.stderr, flush=True)

    def _write_stacks(self, line: str) -> None:
        if self._job.folder is None or line == self._written:
            return
        self._written = line
        folder = self._job.folder / "stacks"
        with suppress(OSError):
            if line:
                folder.mkdir(exist_ok=True)
                with (folder / f"rank{self._rank:05d}.txt").open("w") as file:
                    text = f"{line.partition(' ')[2]}\n\n{self._processes[self._rank]}"
                    print(text, file=file, flush=True)
                    faulthandler.dump_traceback(file, all_threads=True)

    # --- once something has failed

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang; any other error as it is."""
        self._returns.set()
        is_collective = isinstance(error, RuntimeError | dist.DistError)
        is_collective = is_collective and COLLECTIVE_ERROR.search(str(error)) is not None
        event, state = FAILED, "failed"
        if is_collective:
            event = LATE if re.search("imed out|timeout", str(error)) else DEAD
            state = "waited"
        short = textwrap.shorten(first_line(error), 200, placeholder=" ...")
        try:
            verdict = in_time(3 * self._answer_seconds, lambda: self._judge(event, state))
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
        if verdict.event != DEAD:
            self._silent = verdict.silent
            # The store may end with this process: let the ranks that hang print their stacks.
            hanging = [self._processes[rank] for rank in verdict.hanging]
            is_true_within(self._answer_seconds, lambda: all(each.is_dead for each in hanging))
        return Transient(f"{self._text(verdict)} (rank {self._rank} got: {short})")

    def _respond(self, event: str) -> None:
        """Say where this rank is, and end the process unless its main thread ends in time."""
        verdict = Verdict(event)
        if event != FAILED:
            try:
                verdict = self._judge(event, "runs")
            except Exception:  # the store was on a rank that has ended meanwhile
                beat = self._heartbeat()
                if event in (LATE, IDLE) and beat.waits_in is None:
                    verdict = Verdict(event, hanging=[self._rank], where=where_it_stands(beat))
        error = Transient("another rank has failed, and this one's main thread did not end")
        if verdict.at_fault:
            error = Transient(self._text(verdict))
        if self._returns.is_set():
            return
        if self._rank in verdict.hanging:
            self._end_hanging(error)
        # A dead rank may have raised an error of its own.
        if verdict.silent and verdict.event != DEAD:
            # Named first: once torchrun sees that a rank is dead, it ends this one.
            with suppress(TimeoutError):  # its disk hangs
                self._job.status = in_time(REPORT_SECONDS, lambda: self._end(error))
            self._kill(verdict.silent)
        # The main thread gets an error in most cases: a peer that ends closes its connections.
        seconds = self._answer_seconds if verdict.at_fault else min(30.0, self._timeout / 2)
        if not self._returns.wait(seconds):
            self._end_by(error)

    def _judge(self, event: str, state: str) -> Verdict:
        """Answer, wait for the other ranks' answers, and find who is at fault."""
        self._answer(state)
        event = self._store.compare_set("event", "", event).decode()  # the first one stays

        def are_enough() -> bool:
            answers = self._answers().items()
            has_failed = any(answer and answer.state == "failed" for _, answer in answers)
            return has_failed or all(a or self._processes[rank].is_dead for rank, a in answers)

        is_true_within(self._answer_seconds, are_enough)
        answers = self._answers()
        silent, hanging = ranks_at_fault(answers, event in (LATE, IDLE))
        where = where_they_wait(answers, self._processes)
        stands = [where_it_stands(a) for rank, a in answers.items() if a and rank in hanging]
        return Verdict(event, silent, hanging, where or "; ".join(stands))

    def _end_hanging(self, error: Transient) -> None:
        print(f"error: rank {self._rank} hangs; its stacks:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for worker in multiprocessing.active_children():  # of the loader, which print theirs
            os.kill(worker.pid or 0, signal.SIGUSR2)
        self._end_by(error)

    def _end_by(self, error: Transient) -> None:
        """Report the error, if none has been, and end the process, even if its disk hangs."""
        status = self._job.status or 1
        try:
            if self._job.status is None:
                status = in_time(REPORT_SECONDS, lambda: self._end(error))
        finally:
            # The others wait for this one, then still read from the store.
            if self._rank == 0 and len(self._ranks) > 1:
                time.sleep(2 * self._answer_seconds)
            os._exit(status)

    def _kill(self, ranks: Sequence[int]) -> None:
        """torchrun waits 30 s for silent ranks of its machine: a stopped one ignores SIGTERM."""
        for process in (self._processes[rank] for rank in ranks):
            if process.state not in ("", "X", "Z"):
                with suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    # --- heartbeats

    def _heartbeat(self, state: str = "") -> Heartbeat:
        beat = Heartbeat(time.monotonic() - self._began, self._job.steps_taken, state)
        saves = self._job.world.background  # its group's collectives are those of another thread
        beat.read(flight_recorder.dump(), saves.group_name if saves is not None else "")
        return beat

    def _write(self, beat: Heartbeat) -> None:
        self._store.set(f"beat/{self._rank}", pickle.dumps(beat))  # type: ignore[arg-type]

    def _read(self, *ranks: int) -> dict[int, Heartbeat]:
        """The last heartbeats of these ranks, or of all."""
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks or self._ranks])
        return dict(zip(ranks or self._ranks, map(pickle.loads, texts), strict=True))

    def _answer(self, state: str) -> None:
        """Answer, unless another thread has, and write torch's records into the run's folder."""
        answer: Any = pickle.dumps(self._heartbeat(state))
        self._store.compare_set(f"answer/{self._rank}", "", answer)
        if state in ("runs", "waited") and self._job.folder is not None:
            folder = self._job.folder / "flight_recorder"
            with suppress(OSError):
                folder.mkdir(exist_ok=True)
                text = json.dumps(flight_recorder.dump())
                (folder / f"rank{self._rank:05d}.json").write_text(text)

    def _answers(self, *ranks: int) -> dict[int, Heartbeat | None]:
        """Of these ranks, or of all; None for one that has not answered."""
        texts = self._store.multi_get([f"answer/{rank}" for rank in ranks or self._ranks])
        answers = [pickle.loads(text) if text else None for text in texts]
        return dict(zip(ranks or self._ranks, answers, strict=True))

    def _text(self, verdict: Verdict) -> str:
        names = ", ".join(map(self._name, verdict.at_fault))
        where = f"; {verdict.where}" if verdict.where else ""
        return f"rank {names} {FAULTS[verdict.event].format(self._timeout)}{where}"

    def _name(self, rank: int) -> str:
        return f"{rank} ({self._processes[rank]})"


def is_true_within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it becomes true; asked ever less often, down to once a second."""
    deadline = time.monotonic() + seconds
    pause = 0.1
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1.0)
    return True
