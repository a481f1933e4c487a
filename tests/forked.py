"""Start the main job in a fork of a process that has imported torch: 0.5 s of processor time
instead of 5.

A real process with its own exit status, output and signals; only the interpreter's start and the
imports are left out. Tests in which those matter start torchrun by the `launch` fixture.
"""

import importlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
# Whose test files have tasks that runs name, and helpers that files elsewhere import.
FOLDERS = [TESTS / name for name in ("core", "features", "together")]
PATHS = os.pathsep.join(map(str, [ROOT, TESTS, *FOLDERS]))

context = multiprocessing.get_context("forkserver")
# What a run imports later is imported once, in the server.
PRELOADED = [
    "dist_amp.train",
    "torch.utils.tensorboard",
    "torch._inductor.config",
    "pydantic",
    "pytest",
    "pyarrow.dataset",  # most of what `datasets` imports; that itself reads the environment
]
context.set_forkserver_preload(PRELOADED)


class Forked:
    """`python -m MODULE ARGS` in `folder`, with those methods of Popen that the tests use."""

    def __init__(
        self, args: list[str], folder: Path, environ: dict[str, str], module: str = "dist_amp.train"
    ):
        self.args = args
        self.returncode: int | None = None
        self._output = Path(tempfile.mkdtemp(prefix="forked"))
        for name in ("stdout", "stderr"):  # `written` may read them before the process opens them
            (self._output / name).touch()
        self._process = context.Process(
            target=_main, args=(module, args, folder, environ, self._output)
        )
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
        return self.written()

    def written(self) -> tuple[str, str]:
        """What it has written so far: stdout, stderr."""
        return (self._output / "stdout").read_text(), (self._output / "stderr").read_text()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _main(
    module: str, args: list[str], folder: Path, environ: dict[str, str], output: Path
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[:0] = [str(folder), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [module, *args]
    # Loader workers: their parent is this process, not the server.
    multiprocessing.set_start_method("fork", force=True)

    import torch

    torch.set_num_threads(1)
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        sys.exit(importlib.import_module(module).main())


class Launch:
    """launch(ranks, "--key", "value", ...): a real run of the main job in a folder.

    ranks=0 is `python -m dist_amp.train`, forked from a process that has its imports (see
    forked.py); above that, torchrun. Returns the finished process: returncode,
    stdout, stderr. `launch.start` returns it while it runs. `launch.each` and `launch.start_each`
    fork the ranks without torchrun, with the variables that every launcher sets, and return a list
    with one entry per rank: a twentieth of torchrun's processor time.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[Forked] = []
        self.finished: list[subprocess.CompletedProcess] = []

    def __call__(
        self, ranks: int, *args: object, timeout: float = 300, **options
    ) -> subprocess.CompletedProcess:
        process = self.start(ranks, *args, **options)
        result = finish(process, timeout)
        if process not in self.started:
            self.finished.append(result)
        return result

    def outputs(self, most: int = 4000) -> Iterator[tuple[str, str]]:
        """(command, end of its output) of each run, for the report of a test that failed."""
        texts = [(run.args, *run.written()) for run in self.started]
        texts += [(run.args, run.stdout, run.stderr) for run in self.finished]
        for args, *output in texts:
            yield " ".join(args), "\n".join(text[-most:] for text in output if text)

    def start(
        self,
        ranks: int,
        *args: object,
        torchrun: tuple[str, ...] = (),
        module: str = "dist_amp.train",
        **environment: str,
    ):
        words = list(map(str, args))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, **environment}
        if ranks == 0:
            self.started.append(Forked(words, self.folder, environ, module))
            return self.started[-1]
        options = f"--standalone --local-addr 127.0.0.1 --nproc_per_node={ranks}"
        command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *torchrun]
        command += ["-m", "dist_amp.train", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=environ, **pipes)

    def module(self, module: str, *args: object, timeout: float = 300, **environment: str):
        """`python -m MODULE ARGS` or `python script.py`, forked; main() returns the exit status."""
        return self(0, *args, timeout=timeout, module=module, **environment)

    def each(self, ranks: int, *args: object, timeout: float = 300, **environment: str):
        started = self.start_each(ranks, *args, **environment)
        try:
            return [finish(process, timeout) for process in started]
        finally:
            for process in started:
                process.kill()

    def start_each(self, ranks: int, *args: object, **environment: str) -> list[Forked]:
        """Of a rank's variables, "{rank}" is its number."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        world |= {"RANK": "{rank}", "LOCAL_RANK": "{rank}", **environment}
        of_ranks = [
            {name: text.replace("{rank}", str(rank)) for name, text in world.items()}
            for rank in range(ranks)
        ]
        return [self.start(0, *args, **variables) for variables in of_ranks]


def finish(process, timeout: float) -> subprocess.CompletedProcess:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
