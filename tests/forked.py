"""Start the main job in a fork of a process that has imported torch: 0.5 s of processor time instead of 5.

A real process with its own exit status, output and signals; only the interpreter's start and the imports are left out.
Tests in which those matter ask the `launch` fixture for a fresh process.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["dist_amp.train", "torch.utils.tensorboard", "torch._inductor.config", "tyro._cli", "pytest"])


class Forked:
    """`python -m MODULE ARGS` in `folder`, with the methods of subprocess.Popen that the tests use."""

    def __init__(self, args: list[str], folder: Path, environ: dict[str, str], module: str = "dist_amp.train"):
        self.args = args
        self.returncode: int | None = None
        self._output = Path(tempfile.mkdtemp(prefix="forked"))
        self._process = context.Process(target=_main, args=(module, args, folder, environ, self._output))
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return (self._output / "stdout").read_text(), (self._output / "stderr").read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _main(module: str, args: list[str], folder: Path, environ: dict[str, str], output: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [module, *args]
    multiprocessing.set_start_method("fork", force=True)  # loader workers: their parent is this process, not the server

    import torch

    torch.set_num_threads(1)
    sys.exit(importlib.import_module(module).main())
