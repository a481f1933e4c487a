"""Spare processes of `dist_amp launch`: the ranks of a restart, which have imported torch already.

Each rank of this machine has one. It waits, idle and without a GPU, in the launcher's environment
and folder; a restart sends it the environment and the arguments of its rank. In place of one that
has died an ordinary process is started.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from subprocess import Popen
from typing import Any

TRAIN = "dist_amp.train"
IMPORTS = (TRAIN, "torch._dynamo", "torch.utils.tensorboard", "datasets")  # by most runs
AFTER_SECONDS = 20.0  # since the ranks were started, so as not to slow their start; assumed


class Spares:
    """The spare processes of this machine's ranks, by local rank."""

    def __init__(self) -> None:
        self._spares: dict[int, tuple[Popen[bytes], socket.socket]] = {}
        self._commands: dict[int, tuple[str, ...]] = {}
        self._started_at = 0.0

    def take(self, handler: Any, command: tuple[str, ...], environ: dict[str, str]) -> Any:
        """A spare that does what this command of torchrun's handler would do; None without one."""
        if ("-m", TRAIN) not in pairwise(command):
            return None
        local_rank = handler.local_rank_id
        self._started_at = time.monotonic()
        self._commands[local_rank] = command
        spare, orders = self._spares.pop(local_rank, (None, None))
        if spare is None or orders is None:
            return None
        job = {
            "arguments": command[command.index(TRAIN) + 1 :],
            "environ": environ,
            "output": [file and file.name for file in (handler._stdout, handler._stderr)],
        }
        with suppress(OSError), orders:
            orders.setblocking(False)  # more than its buffer is refused
            orders.sendall(json.dumps(job).encode())
            if spare.poll() is None:
                return spare
        end(spare)
        return None

    def prepare(self) -> None:
        """Start those that are missing, once the ranks have had time to start."""
        if time.monotonic() - self._started_at < AFTER_SECONDS:
            return
        for local_rank, command in self._commands.items():
            if local_rank not in self._spares:
                with suppress(OSError):  # of memory, processes or files; tried again later
                    self._spares[local_rank] = start(command)
        self._started_at = time.monotonic()

    def close(self) -> None:
        for spare, orders in self._spares.values():
            orders.close()
            end(spare)


def start(command: tuple[str, ...]) -> tuple[Popen[bytes], socket.socket]:
    """(a spare process, the socket that it waits at), for ranks that this command starts."""
    launcher_end, spare_end = socket.socketpair()
    interpreter = command[: command.index(TRAIN)]  # and -m; it may be wrapped by numactl
    words = (*interpreter, __name__, str(spare_end.fileno()))
    with spare_end:
        spare = Popen(words, pass_fds=[spare_end.fileno()], start_new_session=True)
    return spare, launcher_end


def end(spare: "Popen[bytes]") -> None:
    spare.kill()
    spare.wait()


def main() -> int:
    """Import, wait for a rank's job and do it."""
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        for name in IMPORTS:
            with suppress(ImportError):  # of what the project does without
                import_module(name)
        text = b"".join(iter(lambda: orders.recv(2**16), b""))
    if not text:  # the launcher has ended
        return 0
    job = json.loads(text)
    os.environ.clear()
    os.environ.update(job["environ"], DIST_AMP_STARTED_AT=f"{time.time()}")
    for descriptor, path in enumerate(job["output"], 1):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    train = sys.modules[TRAIN]
    sys.argv = [str(train.__file__), *job["arguments"]]
    sys.orig_argv = [*sys.orig_argv[:-2], TRAIN, *job["arguments"]]
    status: int = train.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
