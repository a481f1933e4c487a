"""Break a real run in every way we know: bash launch/chaos.sh [--quick] [NAME ...]

Every trial starts the main job by torchrun, breaks it, lets it continue, and compares its end to a
run that was left alone: every tensor of the last checkpoint bit by bit, with every rank's
generators, and every logged figure that is not a time. The last lines are a table of the trials.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import torch
from forked import Launch
from restless import MAIN_ONLY, POINTS, STEPS_BETWEEN
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dist_amp.checkpoint.format import (
    Reader,
    all_checkpoints,
    integrity_error,
    read_into,
    read_manifest,
)
from dist_amp.checkpoint.resume import newest_checkpoint
from dist_amp.world import World

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
# Ranks and strategy of a bit-exact run's attempts.
ANY_WORLD = [(4, "ddp"), (2, "fsdp"), (1, "single"), (8, "hsdp"), (2, "ddp"), (4, "fsdp")]
CELLS = [(strategy, dtype) for strategy in LAYOUTS for dtype in ("fp16", "bf16")]


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
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def count(self, begins: str) -> int:
        return sum(line.startswith(begins) for line in self.lines)

    def wait_for(self, begins: str, count: int = 1, seconds: float = 300) -> None:
        """Until there are so many lines with this beginning; the limit ends a trial that hangs."""
        deadline = time.monotonic() + seconds
        while self.count(begins) < count:
            ended = self.process.poll() is not None and self.count(begins) < count
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no line {begins!r} ({count}):\n{self.text[-3000:]}")
            time.sleep(0.01)

    def end(self, seconds: float = 600) -> int:
        return self.process.wait(seconds)


class Job(Process):
    """A run of the main job by torchrun."""

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


def as_options(words: dict) -> list[str]:
    return [text for key, value in words.items() for text in (f"--{key}", str(value))]


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


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, by its name."""
    reader = Reader(checkpoint)
    tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), "tensors alone"
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_into(tensors, reader)
    return tensors


def figures_of(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without times and memory, which no two runs share."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "train/", "eval/", "amp/")
    return [{key: value for key, value in line.items() if key.startswith(kept)} for line in lines]


def differences(run: Path, other: Path) -> list[str]:
    """What two finished runs do not have alike, bit by bit."""
    ends = [all_checkpoints(folder)[-1] for folder in (run, other)]
    found = [] if ends[0].name == ends[1].name else [f"{ends[0].name} and {ends[1].name}"]
    a, b = map(tensors_of, ends)
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b or not same(a[name], b[name]):
            found.append(name)
    figures = [figures_of(run), figures_of(other)]
    for line, (one, two) in enumerate(zip(*figures, strict=False)):
        for key in one | two:
            if one.get(key) != two.get(key):
                values = f"{one.get(key)} {two.get(key)}"
                found.append(f"line {line}, step {one['step']}: {key} {values}")
    if len(figures[0]) != len(figures[1]):
        found.append(f"{len(figures[0])} and {len(figures[1])} lines of metrics.jsonl")
    manifests = [read_manifest(end) for end in ends]
    for name in ("samples", "evaluation", "evaluated_step", "best"):
        if getattr(manifests[0], name) != getattr(manifests[1], name):
            found.append(name)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit: nan equals nan, and 0.0 does not equal -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@dataclass
class Row:
    """A line of the table at the end."""

    what: str
    good: int = 0
    tried: int = 0
    note: str = ""
    troubles: list[str] = field(default_factory=list)

    def add(self, troubles: list[str]) -> None:
        self.tried += 1
        self.good += not troubles
        self.troubles += troubles[:5]


def unless(good: object, job: Process) -> list[str]:
    """What a job printed, as a trouble, unless all is well."""
    return [] if good else [job.text[-3000:]]


class Chaos:
    """Trials in folders of their own; `through` keeps the runs that were left alone."""

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

    def finish(self, job: Job, **words) -> Job:
        """Start the same run again, to its end."""
        again = self.job(job.ranks, folder=job.folder, **words)
        again.end()
        return again

    def compare(self, job: Job, **words) -> list[str]:
        """What is wrong with a run that has ended: not well, or not as the one left alone."""
        if job.end() != 0 or job.summary["stopped_by"] != "completed":
            return [f"status {job.process.returncode}:\n{job.text[-2000:]}"]
        return differences(job.run, self.through(job.ranks, **words))


def sigkills(chaos: Chaos, kills: int, cells=CELLS):
    """SIGKILL of a random rank at random times; torchrun starts all again."""
    for number, (strategy, dtype) in enumerate(cells):
        words = {**LAYOUTS[strategy], "precision.dtype": dtype, "train.steps": 60 + 50 * kills}
        words["data.workers"] = 2 * (number % 2)
        what = f"SIGKILL of a rank, {strategy} {dtype}, {words['data.workers']} workers"
        row = Row(what, tried=kills)
        job = chaos.job(restarts=5 * kills, **words)
        seconds = []
        for _ in range(kills):
            job.wait_for("step", count=1 + job.count("step"))
            time.sleep(chaos.random.uniform(0, 1.5))
            starts = job.count("run    ")
            victim = chaos.random.choice(list(job.rank_processes().values()))
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            job.wait_for("run    ", count=starts + 1)
            job.wait_for("step", count=job.count("step") + 1)
            seconds.append(time.monotonic() - killed)
        row.troubles = chaos.compare(job, **words)[:5]
        row.good = 0 if row.troubles else kills
        most = f"{statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s (most)"
        row.note = f"bit-identical end; next step after {most}"
        yield row


def hail(chaos: Chaos, kills: int, shortest: float = 6.0, longest: float = 14.0):
    """SIGKILL of a random rank in quick succession, also of one that still starts."""
    words = {"checkpoint.every": 5, "train.steps": 50 * kills}
    row = Row(f"SIGKILL of a rank every {shortest:g} to {longest:g} s, also in its start")
    row.tried = kills
    job = chaos.job(restarts=2 * kills, **words)
    before_a_step = 0
    for _ in range(kills):
        steps = job.count("step")
        time.sleep(chaos.random.uniform(shortest, longest))
        before_a_step += job.count("step") == steps
        if victims := list(job.rank_processes().values()):
            with suppress(ProcessLookupError):
                os.kill(chaos.random.choice(victims), signal.SIGKILL)
    row.troubles = chaos.compare(job, **words)[:5]
    row.good = 0 if row.troubles else kills
    row.note = f"bit-identical end; {before_a_step} kills came before a step"
    yield row


def any_world(chaos: Chaos, kills: int):
    """SIGKILL of all of a bit-exact run, which continues on other ranks by another strategy."""
    words = {"parallel.bit_exact": "true", "task.args.batch_norm": "false", "checkpoint.every": 5}
    words |= {"train.global_batch_size": 16, "train.accumulation_steps": "auto"}
    # One of an epoch's 8 steps is skipped: the scale grows twice in the others.
    words |= {"precision.dtype": "fp16", "precision.scaler.growth_interval": 3}
    words["train.steps"] = 40 * kills
    row = Row("SIGKILL of a bit-exact run, which continues in another layout", tried=kills)
    folder = chaos.new_folder()
    layouts = []
    for number in range(kills):
        ranks, strategy = ANY_WORLD[number % len(ANY_WORLD)]
        layouts.append(f"{ranks} {strategy}")
        job = chaos.job(ranks, folder=folder, **words, **{"parallel.strategy": strategy})
        # Not by time: a fast machine would end the run before its last kill.
        job.wait_for("step", count=chaos.random.randint(1, 30))
        time.sleep(chaos.random.uniform(0, 0.05))
        victims = job.rank_processes().values()
        for pid in (job.process.pid, *victims):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.end()
        while any(map(is_there, victims)):
            time.sleep(0.01)
    end = chaos.job(1, folder=folder, **words)
    row.troubles = chaos.compare(end, **words)[:5]
    row.good = 0 if row.troubles else kills
    row.note = f"bit-identical end; {' -> '.join(layouts)} -> 1 single"
    yield row


def points(chaos: Chaos, some=POINTS, strategies=("ddp", "fsdp")):
    """SIGKILL at each point of a checkpoint's write: the one before loads, never a mix."""
    for strategy in strategies:
        words = LAYOUTS[strategy]
        row = Row(f"SIGKILL while a checkpoint is written, {strategy}")
        for point in some:
            for rank in (0,) if point in MAIN_ONLY else (0, 1):
                # The first that is removed is that of the first save, at the third.
                step = (3 if point == "while an old one is removed" else 2) * STEPS_BETWEEN
                job = chaos.job(restarts=1, environ={"DIE_AT": f"{point}:{step}:{rank}"}, **words)
                troubles = chaos.compare(job, **words)
                resumed = [line for line in job.lines if line.startswith("run    ")][-1]
                late = point in ("after the rename", "while an old one is removed")
                if not resumed.endswith(f"step {step if late else step - STEPS_BETWEEN}"):
                    troubles = [*troubles, f"{point}, rank {rank}: {resumed}"]
                row.add(troubles)
        yield row


def flips(chaos: Chaos, bits: int, cuts: int):
    """Bits flipped and files cut short, in every file of a checkpoint."""
    words = LAYOUTS["fsdp"]
    run = chaos.through(**words)
    folder = chaos.root / "damaged" / run.name
    shutil.copytree(run, folder)
    *_, before, newest = all_checkpoints(folder)
    files = sorted(newest.iterdir())
    for what, count in (("a flipped bit", bits), ("a file cut short", cuts)):
        row = Row(f"{what}, anywhere in a checkpoint: refused")
        for number in range(count):
            path = files[number % len(files)]
            with spoilt(path, chaos.random, flip=what == "a flipped bit"):
                good = integrity_error(newest)
                if number % 50 == 0:
                    with redirect_stderr(StringIO()):
                        good = good and newest_checkpoint("auto", folder, World()) == before
            row.add([] if good else [f"{path.name} {number}"])
        yield row
    row = Row("... and the run falls back, and ends bit-identical")
    job = chaos.job(environ={"RAISE_AT": "90:1"}, **words)
    job.end()
    path = all_checkpoints(job.run)[-1] / "__1_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = chaos.finish(job, **words)
    row.add(chaos.compare(again, **words) + unless("__1_0.distcp is damaged" in again.text, again))
    yield row
    row = Row("no checkpoint is whole: stops, never begins at zero")
    for checkpoint in all_checkpoints(job.run):
        (checkpoint / "manifest.json").unlink()
    stopped = chaos.finish(job, **words)
    said = "none of the checkpoints is valid" in stopped.text
    row.add(unless(said and stopped.process.returncode, stopped))
    yield row


@contextmanager
def spoilt(path: Path, numbers: random.Random, flip: bool):
    data = path.read_bytes()
    spoiled = bytearray(data)
    if flip:
        bit = numbers.randrange(8 * len(data))
        spoiled[bit // 8] ^= 1 << bit % 8
    else:
        del spoiled[numbers.randrange(len(data)) :]
    path.write_bytes(spoiled)
    try:
        yield
    finally:
        path.write_bytes(data)


PHASES = {  # the environment that makes them long, and the line with which they begin
    "training": ({}, "step     15"),
    "evaluation": ({"EVALUATION": "3"}, "step     {every}"),
    "warm-up": ({"WARM_UP": "1.5"}, "warming up"),
}
TARGETS = ("torchrun", "one rank", "all ranks")


def signals(chaos, numbers=("SIGTERM", "SIGUSR1"), targets=TARGETS, workers=(0, 2), phases=PHASES):
    """Signals that ask a run to stop: one agreed step, saved, and an end as if nothing had been."""
    for number in numbers:
        row = Row(f"{number} to {', '.join(targets)}; in {', '.join(phases)}")
        most = 0
        for target, worker, phase in ((t, w, p) for t in targets for w in workers for p in phases):
            environ, begins = PHASES[phase]
            words = {"data.workers": worker}
            job = chaos.job(environ=environ, **words)
            job.wait_for(begins.format(every=chaos.words["eval.every"]))
            time.sleep(0.3 if phase == "evaluation" else 0.0)
            pids = list(job.rank_processes().values())
            if target == "torchrun":
                pids = [job.process.pid]
            elif target == "one rank":
                pids = [chaos.random.choice(pids)]
            # A step's line comes a step later, unless an evaluation follows.
            seen = job.count("step") + (phase == "training")
            for pid in pids:
                os.kill(pid, getattr(signal, number))
            job.end()
            where = f"{number} to {target} in {phase}, {worker} workers"
            stopped = job.summary
            if stopped["stopped_by"] != "preempted" or stopped["exit_code"] != 75:
                row.add([f"{where}: {stopped}\n{job.text[-2000:]}"])
                continue
            more = stopped["steps"] - seen
            most = max(most, more)
            saved = all_checkpoints(job.run)[-1].name == f"step_{stopped['steps']:08d}"
            troubles = chaos.compare(chaos.finish(job, **words))
            # The ranks exchange the stop about once a second, and at most after as many steps
            # again.
            if not saved or more > 2 + seen:
                troubles.append(f"{more} more steps, saved {saved}")
            row.add([f"{where}: {trouble}" for trouble in troubles])
        row.note = f"steps after the signal: {most} at most"
        yield row


def orphans(chaos: Chaos):
    """torchrun itself killed: its ranks save, leave, and none is left over."""
    row = Row("SIGKILL of torchrun: no process left")
    for workers in (0, 2):
        job = chaos.job(**{"data.workers": workers})
        job.wait_for("step     15")
        below = children(job.process.pid)
        job.process.kill()
        deadline = time.monotonic() + 300
        while (left := sum(map(is_there, below))) and time.monotonic() < deadline:
            time.sleep(0.1)
        again = chaos.finish(job, **{"data.workers": workers})
        row.add(([f"{left} left"] if left else []) + chaos.compare(again))
    yield row


@contextmanager
def small_disk(folder: Path, options: str):
    """A file system of its own over `folder`; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def disks(chaos: Chaos):
    """A disk that fills up and is freed; a folder that turns read-only."""
    if os.geteuid() != 0:
        yield Row("full and read-only disks", note="skipped: mounting a small disk needs root")
        return
    row = Row("a disk that is full for a while: identical end")
    folder = chaos.new_folder()
    (folder / "run").mkdir()
    with small_disk(folder / "run", "size=16m"):
        job = chaos.job(folder=folder, **{"train.steps": 120})
        job.wait_for("step     15")
        with suppress(OSError), (folder / "run" / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        job.wait_for("warning: checkpoint")
        job.wait_for("step", count=job.count("step") + 5)
        (folder / "run" / "ballast").unlink()
        row.add(chaos.compare(job, **{"train.steps": 120}))
        row.note = "a checkpoint was refused, and its lines were written later"
    yield row
    row = Row("a read-only folder, from the start or later: named; ends from the last checkpoint")
    folder = chaos.new_folder()
    (folder / "run").mkdir()
    with small_disk(folder / "run", "ro"):
        job = chaos.job(folder=folder)
        said = "error: run.dir=run can't be written (Read-only file system)"
        row.add(unless(job.end() and said in job.text, job))
    job = chaos.job(folder=folder)
    job.wait_for("step     15")
    time.sleep(0.5)
    with small_disk(folder / "run" / "checkpoints", "ro"):
        status = job.end()
        said = "could not be written: rank 0: Read-only file system" in job.text
        said = said and "rank 0: Traceback" not in job.text
    # Of before it turned read-only.
    newest = int(all_checkpoints(job.run)[-1].name.removeprefix("step_"))
    again = chaos.finish(job)
    resumed = newest > 0 and f"resumed from step {newest}\n" in again.text
    row.add(unless(status and said and resumed, job) + chaos.compare(again))
    yield row


def hangs(chaos: Chaos, timeout: float = 10.0):
    """A rank that hangs, and one that is stopped: named; the job ends, and can be continued."""
    for what, environ in (("hangs in the loss", {"HANG_AT": "30:1"}), ("is stopped", {})):
        row = Row(f"a rank that {what}: named, and the job ends")
        job = chaos.job(environ=environ, **{"run.timeout_seconds": timeout})
        job.wait_for("step     13")  # the hang is in the step after the next, before 14's line
        began = time.monotonic()
        if not environ:
            os.kill(job.rank_processes()[1], signal.SIGSTOP)
        job.end()
        row.note = f"{time.monotonic() - began:.1f} s with run.timeout_seconds={timeout:g}"
        named = "rank 1" in job.text and ("loss_sum" if environ else "stopped") in job.text
        row.add(unless(named and job.process.returncode, job) + chaos.compare(chaos.finish(job)))
        yield row


def mishaps(chaos: Chaos):
    """A rank that raises, a loader worker killed, TensorBoard's folder removed."""
    row = Row("a batch that is not finite on one rank: skipped by all", tried=1)
    summary = json.loads((chaos.through() / "summary.json").read_text())
    in_all = summary["skipped_steps"] + summary["applied_steps"]
    row.good = int(summary["skipped_steps"] > 0 and in_all == chaos.words["train.steps"])
    yield row
    row = Row("a rank that raises: its error stands alone, and a restart continues")
    job = chaos.job(restarts=1, environ={"RAISE_AT": "50:1"})
    troubles = chaos.compare(job)
    said = job.text.count("rank 1: Traceback") == 1 and "rank 0: Traceback" not in job.text
    row.add(troubles + unless(said, job))
    yield row
    row = Row("a loader worker killed: rank and worker named, and the run can be continued")
    words = {"data.workers": 2}
    job = chaos.job(**words)
    job.wait_for("step     15")
    worker = children(job.rank_processes()[1])[0]
    os.kill(worker, signal.SIGKILL)
    job.end()
    said = f"rank 1: loader worker (pid {worker})" in job.text and job.summary["exit_code"] == 65
    row.add(unless(said, job) + chaos.compare(chaos.finish(job, **words)))
    yield row
    row = Row("TensorBoard's folder removed: the run continues, and writes a new one")
    job = chaos.job()
    job.wait_for("step     15")
    shutil.rmtree(job.run / "tensorboard")
    troubles = chaos.compare(job)
    written = list((job.run / "tensorboard").glob("rank*/events*"))
    row.add(troubles + ([] if len(written) >= 2 else ["no new events"]))
    yield row


LONG: dict[str, Callable] = {
    "sigkills": lambda chaos: sigkills(chaos, 10),
    "hail": lambda chaos: hail(chaos, 12),
    "any_world": lambda chaos: any_world(chaos, 12),
    "points": points,
    "flips": lambda chaos: flips(chaos, 1000, 300),
    "signals": signals,
    "orphans": orphans,
    "disks": disks,
    "hangs": hangs,
    "mishaps": mishaps,
}
SOME_POINTS = ["in the midst of a shard", "before the rename"]
QUICK: dict[str, Callable] = {
    "sigkills": lambda chaos: sigkills(chaos, 2, [("fsdp", "fp16")]),
    "any_world": lambda chaos: any_world(chaos, 4),
    "points": lambda chaos: points(chaos, SOME_POINTS, ["ddp"]),
    "flips": lambda chaos: flips(chaos, 100, 50),
    "signals": lambda chaos: signals(chaos, ["SIGUSR1"], ["torchrun"], [2], ["evaluation"]),
    "hangs": hangs,
    "mishaps": mishaps,
}


def table(rows: list[Row]) -> str:
    lines = [f"{'good':>9}  what was done, and what came of it"]
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        lines.append(f"{row.good:>4}/{row.tried:<4}  {row.what}{note}")
        lines += [f"           wrong: {trouble}" for trouble in row.troubles]
    return "\n".join(lines)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(LONG)}; or all")
    parser.add_argument("--any_world", action="store_true", help="the same as any_world alone")
    parser.add_argument("--quick", action="store_true", help="a few trials of each")
    seed = int(time.time()) % 10_000
    parser.add_argument("--seed", type=int, default=seed, help="of victims, times and bits")
    given = parser.parse_args()
    if given.any_world:
        given.names.append("any_world")
    form = QUICK if given.quick else LONG
    if unknown := [name for name in given.names if name not in form]:
        parser.error(f"unknown name {unknown[0]}; there are {', '.join(form)}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        chaos = Chaos(Path(folder), given.seed)
        about = f"seed {given.seed}, torch {torch.__version__}, {os.cpu_count()} cores"
        print(f"chaos: {about}", flush=True)
        for name, trials in form.items():
            if given.names and name not in given.names:
                continue
            began = time.monotonic()
            for row in trials(chaos):
                rows.append(row)
                took = f"[{time.monotonic() - began:.0f} s]"
                print(f"{table([row]).partition(chr(10))[2]}  {took}", flush=True)
    print(f"\n{table(rows)}")
    return int(any(row.good < row.tried for row in rows))


if __name__ == "__main__":
    sys.exit(main())
