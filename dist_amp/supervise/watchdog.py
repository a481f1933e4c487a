"""Which rank is gone or hangs when a collective fails."""

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
from dist_amp.runtime.rendezvous import in_time
from dist_amp.world import World

ANSWER_SECONDS = 5.0  # in which a rank that is alive says so, when a collective has failed


class RankWatchdog:
    """Who is there: each rank's process, and what befell it, in the store that the ranks share.

    A rank whose collective has timed out says so there. A thread of every rank looks for that, and ends its rank, with
    its stacks, if that neither waited nor failed: it is the one that hangs, and would never be told.
    """

    def __init__(self, world: World):
        self._world = world
        told = world.gather_texts(json.dumps([platform.node(), os.getpid(), time.time_ns()]))
        self._processes: list[tuple[str, int]] = [tuple(json.loads(text)[:2]) for text in told]
        self._key = f"dist_amp/roll/{json.loads(told[0])[2]}"
        self._told = False
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_over, name="watchdog", daemon=True)
        if world.world_size > 1:
            self._watch.start()

    def close(self) -> None:
        self._ended.set()
        if self._watch.is_alive():
            self._watch.join(ANSWER_SECONDS)  # it stays where it is if the store does not answer

    def _watch_over(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        with suppress(Exception):  # the store is gone: torchrun has ended, and we are about to
            while not self._ended.wait(1.0):
                if not store.check([f"{self._key}/timed_out"]):
                    continue
                if in_a_collective():  # which it entered later than the rank whose time is up already
                    store.set(f"{self._key}/{self._world.rank}", "waited")
                elif not self._ended.wait(ANSWER_SECONDS / 2) and not self._told:
                    print(f"error: rank {self._world.rank} hangs; its stacks:", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(all_threads=True)
                    os._exit(1)
                return

    def explain(self, error: BaseException) -> BaseException:
        """A collective's failure as one line that names the ranks which are gone or hang; other errors as they are.

        Where another rank has failed by itself, this one leaves the word to it.
        """
        self._told = True
        if self._world.world_size == 1 or isinstance(error, KeyboardInterrupt | SystemExit):
            return error
        collective = _is_collective(error)
        hangs = collective and "imed out" in str(error)
        try:
            told = in_time(2 * ANSWER_SECONDS, lambda: self._exchange("waited" if collective else "failed", hangs))
        except TimeoutError:
            return self._cut_off(error) if collective else error
        except Exception:  # the store is gone with its host
            return error
        silent = [rank for rank, text in told.items() if not text]
        if not collective or "failed" in told.values() or not silent:
            return error
        if hangs:
            self._end(silent)
        names = ", ".join(map(self._name, silent))
        what = "did not take part in a collective in time: it hangs, is stopped or its machine is gone"
        if not hangs:
            what = "is gone without a word: it was killed, perhaps for memory; its machine's log may tell"
        return Failure(f"rank {names} {what} (rank {self._world.rank} was told: {shortened(error)})")

    def _cut_off(self, error: BaseException) -> Failure:
        """For a rank that reaches neither its peers nor the store, which does not tell why."""
        store = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Failure(
            f"rank {self._name(0)} and the store beside it at {store} do not answer: it is stopped, its machine is "
            f"gone, or the network to it is down (rank {self._name(self._world.rank)} was told: {shortened(error)})"
        )

    def _name(self, rank: int) -> str:
        host, process = self._processes[rank]
        return f"{rank} (process {process} on {host})"

    def _exchange(self, mine: str, hangs: bool) -> dict[int, str]:
        """What each rank says of itself; "" for those that say nothing."""
        store = dist.distributed_c10d._get_default_store()
        keys = {rank: f"{self._key}/{rank}" for rank in range(self._world.world_size)}
        store.set(keys[self._world.rank], mine)
        if hangs:
            store.set(f"{self._key}/timed_out", "")
        deadline = time.monotonic() + (ANSWER_SECONDS if mine == "waited" else 0)
        while True:
            told = {rank: store.get(key).decode() if store.check([key]) else "" for rank, key in keys.items()}
            silent = [rank for rank, text in told.items() if not text and not self._known_dead(rank)]
            if not silent or "failed" in told.values() or time.monotonic() > deadline:
                return told
            time.sleep(0.1)

    def _known_dead(self, rank: int) -> bool:
        host, process = self._processes[rank]
        if host != platform.node() or not Path("/proc/self").exists():
            return False
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def _end(self, ranks: list[int]) -> None:
        """Kill hanging ranks beside us: torchrun would give them half a minute, and a stopped one can't be asked."""
        for host, process in (self._processes[rank] for rank in ranks):
            with suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
                if host == platform.node() and parent == os.getppid():
                    os.kill(process, signal.SIGKILL)


def in_a_collective() -> bool:
    """Whether the main thread waits for other ranks, by the file of its innermost frame; a backward may, too."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    file = Path(frame.f_code.co_filename).as_posix()
    return "/torch/distributed/" in file or "/torch/autograd/" in file or file.endswith("dist_amp/runtime.py")


def shortened(error: BaseException) -> str:
    return textwrap.shorten(first_line(error), 200, placeholder=" ...")


def _is_collective(error: BaseException) -> bool:
    words = ("gloo", "NCCL", "Connection closed by peer", "Timed out", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError | dist.DistError) and any(word in str(error) for word in words)
