"""Which rank is dead or hangs when a collective fails."""

import faulthandler
import json
import os
import platform
import signal
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from dist_amp.errors import Failure, first_line
from dist_amp.fast.process_group import shared_store
from dist_amp.runtime.rendezvous import in_time
from dist_amp.world import World

ANSWER_SECONDS = 5.0  # how long to wait for the other ranks' status after a collective has failed


class RankWatchdog:
    """Names the ranks that caused a failed collective, by a status that every rank leaves in the shared store.

    A rank whose collective timed out says so there. A thread on every rank watches for that, and ends its own rank,
    with its stacks printed, unless that rank waited in the collective too or has failed: then it is the one that hangs,
    which would never notice by itself.
    """

    def __init__(self, world: World):
        self._world = world
        ranks = [json.loads(t) for t in world.gather_texts(json.dumps([platform.node(), os.getpid(), time.time_ns()]))]
        self._processes: list[tuple[str, int]] = [(host, process) for host, process, _ in ranks]
        self._key = f"dist_amp/watchdog/{ranks[0][2]}"  # unique to this run of the world
        self._failed = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if world.world_size > 1:
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS)  # the thread is left behind if the store does not answer

    def _watch(self) -> None:
        store = shared_store()
        with suppress(Exception):  # the store is dead: torchrun has ended, and so will this process
            while not self._closed.wait(1.0):
                if not store.check([f"{self._key}/timed_out"]):
                    continue
                if in_a_collective():  # entered later than on the rank that has timed out
                    store.set(f"{self._key}/{self._world.rank}", "waited")
                elif not self._closed.wait(ANSWER_SECONDS / 2) and not self._failed:
                    print(f"error: rank {self._world.rank} hangs; its stacks:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(all_threads=True)
                    os._exit(1)
                return

    def explain(self, error: BaseException) -> BaseException:
        """A Failure that names the ranks that are dead or hang, if a collective failed; any other error unchanged.

        Unchanged too if another rank has failed by itself, which reports its own error.
        """
        self._failed = True
        if self._world.world_size == 1 or isinstance(error, KeyboardInterrupt | SystemExit):
            return error
        collective = _is_collective(error)
        timed_out = collective and "imed out" in str(error)
        try:
            status = in_time(
                2 * ANSWER_SECONDS, lambda: self._exchange("waited" if collective else "failed", timed_out)
            )
        except TimeoutError:
            return self._cut_off(error) if collective else error
        except Exception:  # the store died with its host
            return error
        silent = [rank for rank, text in status.items() if not text]
        if not collective or "failed" in status.values() or not silent:
            return error
        what = "died without an error: it was killed, perhaps for memory; its machine's log may say why"
        if timed_out:
            self._kill(silent)
            what = "did not take part in a collective in time: it hangs, is stopped or its machine is down"
        names = ", ".join(map(self._name, silent))
        return Failure(f"rank {names} {what} (rank {self._world.rank} got: {shortened(error)})")

    def _cut_off(self, error: BaseException) -> Failure:
        """For a rank that reaches neither the other ranks nor the store, and cannot know why."""
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Failure(
            f"rank {self._name(0)} and the store on its machine at {store} do not answer: it is stopped, its machine "
            f"is down, or the network to it is (rank {self._name(self._world.rank)} got: {shortened(error)})"
        )

    def _name(self, rank: int) -> str:
        host, process = self._processes[rank]
        return f"{rank} (process {process} on {host})"

    def _exchange(self, mine: str, timed_out: bool) -> dict[int, str]:
        """Every rank's status, "waited" or "failed"; "" for those that leave none."""
        store = shared_store()
        keys = {rank: f"{self._key}/{rank}" for rank in range(self._world.world_size)}
        store.set(keys[self._world.rank], mine)
        if timed_out:
            store.set(f"{self._key}/timed_out", "")
        deadline = time.monotonic() + (ANSWER_SECONDS if mine == "waited" else 0)
        while True:
            status = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
            silent = [rank for rank, text in status.items() if not text and not self._known_dead(rank)]
            if not silent or "failed" in status.values() or time.monotonic() > deadline:
                return status
            time.sleep(0.1)

    def _known_dead(self, rank: int) -> bool:
        host, process = self._processes[rank]
        if host != platform.node() or not Path("/proc/self").exists():
            return False
        try:
            return _process_fields(process)[0] in "ZX"
        except OSError:
            return True

    def _kill(self, ranks: list[int]) -> None:
        """Kill hanging ranks of the same torchrun: it would wait 30 s for them, and a stopped one ignores SIGTERM."""
        for host, process in (self._processes[rank] for rank in ranks):
            with suppress(OSError, IndexError):
                if host == platform.node() and int(_process_fields(process)[1]) == os.getppid():
                    os.kill(process, signal.SIGKILL)


def _process_fields(process: int) -> list[str]:
    """The process's state, its parent and more, as /proc lists them after the command. Source: proc(5)."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


# Where the main thread is while it waits for other ranks: their collectives' Python frames, and backward's.
WAITING_IN = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/dist_amp/fast/process_group.py",
    "/dist_amp/supervise/signals.py",
)


def in_a_collective() -> bool:
    """Whether the main thread waits for other ranks, judged by the file of its innermost Python frame."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    file = Path(frame.f_code.co_filename).as_posix()
    return any(part in file for part in WAITING_IN)


def shortened(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), 200, placeholder=" ...")


def _is_collective(error: BaseException) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Timed out", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError | dist.DistError) and any(word in str(error) for word in words)
