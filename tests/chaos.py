"""Runs of the main job that a test breaks, by torchrun or as forked ranks, and how their ends are
compared bit by bit with a run that was left alone.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

import torch
from forked import Launch
from restless import STEPS_BETWEEN
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dist_amp.checkpoint.format import Reader, all_checkpoints, read_into, read_manifest

TESTS = Path(__file__).parent
WORDS = {
    "task.target": "restless:Restless",
    "train.steps": 60,
    "train.micro_batch_size": 2,
    "train.accumulation_steps": 2,
    "checkpoint.every": STEPS_BETWEEN,
    "metrics.log_every": 1,
    "eval.every": 20,
    "optim.warmup_steps": 5,
    "run.deterministic": "true",
    "run.dir": "run",
    "precision.scaler.growth_interval": 7,
    "precision.scaler.init_scale": 2.0**40,
    "train.max_skips_in_a_row": 60,
}
LAYOUTS = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp": {"parallel.strategy": "fsdp", "task.args.batch_norm": "false"},
}


class Process:
    """A command that runs, and what it has printed so far."""

    def __init__(self, command: list[str], folder: Path, environ: dict | None = None):
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        paths = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
        environment = os.environ | paths | (environ or {})
        output = {"stdout": self._output, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **output)

    @property
    def text(self) -> str:
        handle = self._output.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def count(self, begins: str) -> int:
        return sum(line.startswith(begins) for line in self.text.splitlines())

    def wait_for(self, begins: str, count: int = 1, seconds: float = 300) -> None:
        """Until there are so many lines with this beginning; the limit ends a test that hangs."""
        deadline = time.monotonic() + seconds
        while self.count(begins) < count:
            ended = self.has_ended and self.count(begins) < count
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no line {begins!r} ({count}):\n{self.text[-3000:]}")
            time.sleep(0.01)

    def end(self, seconds: float = 600) -> int:
        return self.process.wait(seconds)


class Job(Process):
    def __init__(self, folder: Path, words: dict, ranks: int, restarts: int, environ: dict | None):
        self.folder = folder
        self.run = folder / words["run.dir"]
        self.ranks = ranks
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", f"--nproc_per_node={ranks}"]
        command += [f"--max-restarts={restarts}"]
        command += ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
        environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | (environ or {})
        super().__init__([*command, "-m", "dist_amp.train", *as_options(words)], folder, environ)

    def rank_processes(self) -> dict[int, int]:
        """{rank: process id} of those that are there."""
        found = {}
        for pid in children(self.process.pid):
            with_rank = environment(pid)
            if "RANK" in with_rank and fields_of(pid)[1] == str(self.process.pid):
                found[int(with_rank["RANK"])] = pid
        return found

    @property
    def summary(self) -> dict:
        path = self.run / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {"stopped_by": "no summary"}


class ForkedJob(Job):
    """The same run without torchrun, by forked ranks: a tenth of its processor time."""

    def __init__(self, folder: Path, words: dict, ranks: int, environ: dict | None = None):
        self.folder = folder
        self.run = folder / words["run.dir"]
        self.ranks = ranks
        self.processes = Launch(folder).start_each(ranks, *as_options(words), **(environ or {}))

    @property
    def text(self) -> str:
        return "".join(text for process in self.processes for text in process.written())

    @property
    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def end(self, seconds: float = 600) -> int:
        return max(abs(process.wait(seconds)) for process in self.processes)

    def rank_processes(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


class Chaos:
    """Jobs in folders of their own; `through` keeps the runs that were left alone."""

    def __init__(self, root: Path, seed: int, **words):
        self.root = root
        self.words = WORDS | words
        self.random = random.Random(seed)
        self._count = 0
        self._through: dict[str, Path] = {}

    def new_folder(self) -> Path:
        self._count += 1
        folder = self.root / f"{self._count:03d}"
        folder.mkdir(parents=True)
        return folder

    def job(self, ranks: int = 2, restarts: int = 0, environ=None, folder=None, **words) -> Job:
        return Job(folder or self.new_folder(), self.words | words, ranks, restarts, environ)

    def forked(self, ranks: int = 2, environ=None, folder=None, **words) -> ForkedJob:
        return ForkedJob(folder or self.new_folder(), self.words | words, ranks, environ)

    def through(self, ranks: int = 2, **words) -> Path:
        """The folder of the same run, left alone."""
        key = f"{ranks} {sorted(words.items())}"
        if key not in self._through:
            folder = self.new_folder()
            settings = self.words | words
            for rank in Launch(folder).each(ranks, *as_options(settings), timeout=600):
                assert rank.returncode == 0, rank.stderr[-3000:]
            self._through[key] = folder / settings["run.dir"]
        return self._through[key]

    def finish(self, job: Job, **words) -> ForkedJob:
        again = self.forked(job.ranks, folder=job.folder, **words)
        self.check(again, **words)
        return again

    def check(self, job: Job, **words) -> None:
        assert job.end() == 0, job.text[-3000:]
        assert job.summary["stopped_by"] == "completed"
        assert differences(job.run, self.through(job.ranks, **words)) == []


def as_options(words: dict) -> list[str]:
    return [text for key, value in words.items() for text in (f"--{key}", str(value))]


# ---- processes ----


def children(pid: int) -> list[int]:
    """Process ids below `pid`."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        direct = [int(p) for thread in threads for p in (thread / "children").read_text().split()]
    except OSError:
        return []
    return direct + [below for child in direct for below in children(child)]


def fields_of(pid: int) -> list[str]:
    """A process's state, its parent and more: proc(5); as of a dead one if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def environment(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def is_there(pid: int) -> bool:
    return fields_of(pid)[0] not in "ZX"


# ---- two runs' ends ----


def tensors_of(checkpoint: Path) -> dict[str, tuple]:
    """{name: its bits} of a checkpoint's tensors: nan equals nan, and 0.0 does not equal -0.0."""
    reader = Reader(checkpoint)
    tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "tensors alone"
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_into(tensors, reader)
    return {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()}


def figures_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without times and memory, which no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "train/", "eval/", "amp/")
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in lines]


def differences(run: Path, other: Path) -> list[str]:
    """What two finished runs do not have alike: every tensor of the last checkpoint, every rank's
    generators, every logged figure that is not a time.
    """
    ends = [all_checkpoints(folder)[-1] for folder in (run, other)]
    found = [] if ends[0].name == ends[1].name else [f"{ends[0].name} and {ends[1].name}"]
    a, b = map(tensors_of, ends)
    found += [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]
    for number, (one, two) in enumerate(zip_longest(figures_of(run), figures_of(other))):
        if one != two:
            found.append(f"line {number}: {one} {two}")
    a, b = (vars(read_manifest(end)) for end in ends)
    kept = ("samples", "evaluation", "evaluated_step", "best")
    return found + [name for name in kept if str(a[name]) != str(b[name])]  # nan equals nan
