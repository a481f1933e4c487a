"""How fast each kind of source is read, compared with torch's DataLoader and the `datasets` library.

python -m dist_amp.bench data
python -m dist_amp.bench data --sources parquet images --rows 100000 --workers 0 4 --out runs/bench_data

dist_amp is the batches of a run, in its order. DataLoader is torch's own over the same dataset, with shuffle=True.
datasets is the same files by load_dataset(...).with_format("torch") in a DataLoader; streamed, with a shuffle buffer of
1,000 rows. Batches have 32 samples: rows of text, documents padded to their longest, packed rows, images. All loaders
take turns, and are timed once their workers have batches ready. Last comes what two ranks of the demo wait for data.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils.data import DataLoader

from dist_amp.bench import harness, machine
from dist_amp.bench.data_kinds import KINDS, Counted, Kind, write_files
from dist_amp.bench.report import digits, document, median, median_interval, save, table
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.load import load_config
from dist_amp.data import build_batches
from dist_amp.run import build_run
from dist_amp.runtime.native_precision import native_precision
from dist_amp.settings import DataConfig
from dist_amp.step import train_step
from dist_amp.world import World

BATCH = 32
OURS, BARE, MAP, STREAM = LOADERS = ("dist_amp", "DataLoader", "datasets", "datasets, streamed")
DEMO = ["--train.micro_batch_size", "8", "--optim.lr", "4e-3", "--optim.warmup_steps", "50"]  # configs/demo.toml
MOST_WAIT = 0.01  # of the demo's step
WARM_UP_STEPS = 10
Open = Callable[[int], Iterator[Any]]  # workers -> batches of `Counted`, without end


def ours(dataset: Any, task: Any, workers: int) -> Iterator[Any]:
    batches = build_batches(DataConfig(workers=workers), task, dataset, BATCH, 1, 0, World())
    try:
        for (batch,) in batches:
            yield batch
    finally:
        batches.close()


def bare(dataset: Any, task: Any, shuffle: bool, workers: int) -> Iterator[Any]:
    options = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": task.collate}
    loader: Any = DataLoader(dataset, BATCH, shuffle, **options)
    while True:
        yield from loader


def loaders_of(kind: Kind, folder: Path) -> dict[str, Open]:
    """The loaders by name; `datasets` where it can read the files."""
    import datasets

    dataset, task = kind.dataset(folder), Counted(kind.collate)
    found: dict[str, Open] = {OURS: partial(ours, dataset, task), BARE: partial(bare, dataset, task, True)}
    if kind.loader:
        load = partial(datasets.load_dataset, kind.loader, data_files=str(folder / kind.files), split="train")
        stream = load(streaming=True).with_format("torch").shuffle(seed=0, buffer_size=1000)
        found[MAP] = partial(bare, load().with_format("torch"), task, True)
        found[STREAM] = partial(bare, stream, task, False)
    return found


def speed(batches: Iterator[Any], ahead: int, seconds: float) -> list[float]:
    """[samples per second, tokens per second] in about so many seconds, once `ahead` batches have been read."""
    for _ in range(ahead):
        next(batches)
    counts, began, now = np.zeros(2), time.perf_counter(), 0.0
    while not counts[0] or now - began < seconds:
        counts += next(batches)[:2]
        now = time.perf_counter()
    batches.close()  # type: ignore[attr-defined]  # ends the workers
    return (counts / (now - began)).tolist()


def demo_wait(world: World, steps: int, workers: int) -> list[float]:
    """[share of the demo's steps spent waiting for data, seconds per step], each the largest of all ranks."""
    multiprocessing.set_start_method("fork", force=True)  # of workers: a spawned process would spawn its own
    dtype, _ = native_precision()
    precision = ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
    words = [*DEMO, *precision, "--data.workers", str(workers), "--eval.every", "off", "--run.resume", "never"]
    run = build_run(load_config(words, environ={}), world)
    waited = began = 0.0
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        micro_batches = next(run.data)
        waited += time.perf_counter() - asked
        train_step(run, micro_batches)
    seconds = time.perf_counter() - began
    run.data.close()
    return [max(column) for column in zip(*world.gather_numbers([waited / seconds, seconds / steps]), strict=True)]


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A row per kind of source, workers and loader; medians, and the interval of the ratio to the DataLoader."""
    lines = []
    for row in rows:
        line = {"source": row["source"], "workers": str(row["workers"]), "loader": row["loader"]}
        line["samples/s"] = digits(median(row["samples_per_second"]))
        line["tokens/s"] = digits(median(row["tokens_per_second"])) if any(row["tokens_per_second"]) else ""
        middle, low, high = median_interval(row["over_dataloader"])
        line["/ DataLoader"] = "1" if row["loader"] == BARE else f"{middle:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(line)
    return table(lines, left=3)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m dist_amp.bench data", __doc__)
    harness.add_choices(parser, sources=list(KINDS))
    add, one = parser.add_argument, harness.at_least(1)
    add("--rows", type=harness.at_least(4 * BATCH), default=10_000, metavar="N", help="of a source; default: 10000")
    add("--workers", nargs="+", type=harness.at_least(0), default=[0, 2], metavar="N", help="default: 0 2")
    add("--rounds", type=one, default=7, metavar="N", help="default: 7; from 6 on with 95 %% intervals")
    add("--seconds", type=harness.at_least(0, float), default=1.0, metavar="N", help="of one round; default: 1")
    add("--steps", type=one, default=300, metavar="N", help="of the demo; default: 300")
    add("--out", type=Path, metavar="DIR", help="write data.json and data.md there; default: only print")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 a wrong argument."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """Measure one kind of source after the other, with no other cache than a temporary one."""
    import datasets

    options = parse(words)
    datasets.disable_progress_bars()
    report: dict[str, Any] = machine.about(torch.device("cpu"), "datasets", "pyarrow") | {"rows": []}
    print(machine.machine_line(report), flush=True)
    with (
        tempfile.TemporaryDirectory() as name,
        # A stream of Parquet files sleeps for 5 s whenever it ends.
        patch.multiple(datasets.config, HF_DATASETS_CACHE=Path(name) / "cache", SLEEP_TIME_ON_THREADS_SHUTDOWN=0),
        harness.quiet_process(one_thread=True),
    ):
        write_files(folder := Path(name), options.rows)
        for source in options.sources:
            loaders = loaders_of(KINDS[source], folder)
            for workers in options.workers:
                rows = measured(loaders, workers, options.rounds, options.seconds)
                report["rows"] += (own := [{"source": source, "workers": workers, **row} for row in rows])
                print(f"\n{table_of(own)}", flush=True)
    share, seconds = harness.on_ranks(2, demo_wait, options.steps, 2)
    report["demo"] = {"wait_share": share, "step_seconds": seconds, "target": MOST_WAIT}
    verdict = "met" if share <= MOST_WAIT else "missed"
    demo = f"demo: 2 ranks with 2 workers each wait {100 * share:.2f} % of a step of {1e3 * seconds:.1f} ms for data"
    demo += f"; target <= {100 * MOST_WAIT:g} %: {verdict}"
    print(f"\n{demo}", flush=True)
    if options.out is not None:
        save(report, document(machine.machine_line(report), table_of(report["rows"]), demo), options.out, "data")


def measured(loaders: dict[str, Open], workers: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row per loader: both speeds in each round, and the first as a ratio to the DataLoader's of the same round."""
    ahead = 1 + 2 * workers  # workers keep 2 batches each

    def block(name: str, is_warm_up: bool) -> list[float]:
        return speed(loaders[name](workers), ahead, seconds)

    speeds = harness.in_turns(loaders, block, rounds)
    rows = []
    for name, own in speeds.items():
        samples, tokens = (list(column) for column in zip(*own, strict=True))
        ratios = [mine / base for mine, (base, _) in zip(samples, speeds[BARE], strict=True)]
        rows.append(
            {"loader": name, "samples_per_second": samples, "tokens_per_second": tokens, "over_dataloader": ratios}
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
