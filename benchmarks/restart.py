"""python -m benchmarks restart [--rounds 3] [SETTINGS]: duration of a restart, by phase.

Runs the demo on two ranks under `dist_amp launch`, kills one with SIGKILL, and prints the seconds
until the end of the next step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import command

SETTINGS = "--config demo --use_amp false --train.steps 100000".split()
SETTINGS += "--checkpoint.every 20 --metrics.log_every 1".split()


@command
def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="restart", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options, words = parser.parse_known_args(argv)
    seconds: list[float] = []
    for _ in range(options.rounds):
        phases = restart(words)
        seconds.append(sum(phases.values()))
        parts = ", ".join(f"{phase} {value:.2f}" for phase, value in phases.items())
        print(f"{seconds[-1]:6.2f} s: {parts}", flush=True)
    print(f"median: {median(seconds):.2f} s")


def restart(words: Sequence[str]) -> dict[str, float]:
    """Seconds by phase, from killing rank 1 to the end of the next step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = [sys.executable, "-m", "dist_amp", "launch", "--nproc-per-node", "2"]
        start += [*SETTINGS, *words, "--run.dir", name]
        launcher = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_starts(folder, 1)
            os.kill(rank_1_of(launcher.pid), signal.SIGKILL)
            return wait_for_starts(folder, 2)[-1]
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()


def wait_for_starts(folder: Path, number: int) -> list[dict[str, float]]:
    """The phases of each start, once there are `number`. Raises RuntimeError after 300 s."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        starts = [line for line in lines if "start/imports_seconds" in line]
        if len(starts) >= number:
            return [phases_of(line) for line in starts]
        time.sleep(0.2)
    raise RuntimeError(f"the run has not started {number} times within 300 s")


def phases_of(line: dict[str, float]) -> dict[str, float]:
    names = [name for name in line if name.startswith("start/")]
    return {name.removeprefix("start/").removesuffix("_seconds"): line[name] for name in names}


def rank_1_of(launcher: int) -> int:
    """The process id of the launcher's second rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = []
    for child in children:
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if b"RANK=1" in environ:
            ranks.append(int(child))
    (rank,) = ranks
    return rank
