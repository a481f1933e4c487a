"""python -m dist_amp.bench amp [EXPERIMENT ...]: what mixed precision buys on this device, as a table and a picture.

linear     ten numbers to one, twenty points: the smallest thing that works
mlp        three layers of 4096: matrix products and little else; batch sizes, autocast and scaler each on and off
sinusoid   1 x 1 convolutions that draw a picture of 512 x 512: traffic to memory
cnn        two convolutions on 3 x 32 x 32: small operations
gpt        a GPT of 124 M parameters
dtypes     what autocast computes in which dtype

Without a name, all of them. A task of your own, with the main job's settings:

    python -m dist_amp.bench amp --task.target my_file:MyTask --train.micro_batch_size 32 --train.steps 100

Each runs in float32, TF32, bfloat16 and float16, with and without the loss scaler, as train_step takes its steps; in
training and inference, eager and compiled; beside the loop written by hand. The report is amp.md, amp.json, pictures,
and a TensorBoard folder: times, peak memory, the loss curves and whether they agree, what the device is held up by, and
what to use. What does not fit into --minutes is left out, and named.
"""

import argparse
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_amp.bench.amp.experiment import MODES, Experiment, own_experiment
from dist_amp.bench.amp.experiments import cnn, dtypes, gpt, linear, mlp, sinusoid
from dist_amp.bench.amp.measure import FORMS, Effort, measure
from dist_amp.bench.amp.pictures import illustrate
from dist_amp.bench.amp.report import REDUCED_BANNER, save, terminal
from dist_amp.bench.amp.roofline import Ceilings, measure_ceilings
from dist_amp.bench.amp.verdict import add_parity, verdict
from dist_amp.bench.amp.ways import FP32, WAYS
from dist_amp.bench.machine import about
from dist_amp.bench.report import rows_of_markdown
from dist_amp.bench.timing import prime, release, why_not
from dist_amp.command import Parser, exit_status
from dist_amp.config import ConfigError, nearest_name
from dist_amp.run import load_config
from dist_amp.runtime import RunConfig, World, start

EXPERIMENTS = {"linear": linear, "mlp": mlp, "sinusoid": sinusoid, "cnn": cnn, "gpt": gpt}
DTYPES = "dtypes"
NAMES = (*EXPERIMENTS, DTYPES)
PACKAGES = ("triton", "matplotlib")
SPARE_SECONDS = 20  # of --minutes, for the pictures
BLOCK_SECONDS = 0.2  # of steps between two clocks


class Bench:
    """One run of the command: its settings, its time and its report."""

    def __init__(self, world: World, options: argparse.Namespace):
        self.world, self.options = world, options
        self.began = time.monotonic()
        self.experiments: list[Experiment] = options.experiments
        self.effort = Effort(
            world,
            ("--run.device", world.device.type),
            options.backend,
            options.forms,
            options.modes,
            options.ways,
            options.rounds,
            0.0 if options.reduced else BLOCK_SECONDS,
            self.began + options.minutes * 60 - SPARE_SECONDS,
        )
        self.report: dict[str, Any] = {
            "reduced": options.reduced,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m dist_amp.bench amp", *options.words]),
            **about(world.device, *PACKAGES),
            "rounds": options.rounds,
            "seconds": 0.0,
            "ceilings": {},
            "experiments": [],
            "dtypes": {},
            "left_out": [],
        }

    def run(self) -> None:
        if self.options.reduced:
            self.world.say(REDUCED_BANNER.strip("*"))
        prime(self.world.device)
        ceilings = measure_ceilings(self.world)
        self.report["ceilings"] = asdict(ceilings)
        if self.options.dtypes:
            self.show_dtypes()
        for experiment in self.experiments:
            if self.effort.seconds_left < 0:
                self.report["left_out"].append(experiment.name)
                continue
            told, pictures = self.tell(experiment, ceilings)
            self.report["experiments"].append(told)
            self.report["seconds"] = time.monotonic() - self.began
            self.world.say(terminal(told))
            told["files"] = illustrate(told, experiment, pictures, self.options.out, self.options.reduced)
            self.world.say("\n".join(told["files"]))
            save(self.report, self.experiments, self.options.out)
        save(self.report, self.experiments, self.options.out)

    def tell(self, experiment: Experiment, ceilings: Ceilings) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The experiment's figures and verdict, and what its models draw; or why it has none."""
        began = time.monotonic()
        told: dict[str, Any] = {"name": experiment.name}
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # each run's own introduction
            try:
                told |= measure(self.effort, experiment)
            except ConfigError:  # in the settings, all precisions' alike
                raise
            except Exception as error:
                told["cant"] = why_not(error)
        pictures: dict[str, Tensor] = told.pop("pictures", {})
        if "cant" not in told:
            add_parity(told)
            told["verdict"] = verdict(told, experiment, ceilings)
        release(self.world.device)
        told["took_seconds"] = time.monotonic() - began
        return told, pictures

    def show_dtypes(self) -> None:
        rows = dtypes.demonstrate(self.world.device)
        shown = self.experiments if self.options.own else [gpt.REDUCED]
        configs = [experiment.config(*self.effort.words) for experiment in shown]
        told = [dtypes.operations(config, self.world) for config in configs]
        self.report["dtypes"] = {"about": dtypes.__doc__, "rows": rows, "operations": told}
        head = list(rows[0])
        self.world.say(f"\n{DTYPES}\n" + rows_of_markdown(head, [list(row.values()) for row in rows], left=len(head)))
        for one in told:
            self.world.say(f"\n{one['target']}\n{one['text']}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; what they don't know are the main job's settings, of a task of one's own. Errors: ConfigError."""
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    parser = Parser("python -m dist_amp.bench amp", __doc__)
    add = parser.add_argument
    add("--reduced", action="store_true", help="small models on a CPU: tries every path; its timings mean nothing")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="precisions; default: all")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    add("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="default: both")
    add("--batches", nargs="+", type=int, metavar="N", help="more micro-batch sizes; default: the experiment's own")
    add("--backend", help="of torch.compile; default: inductor, with --reduced aot_eager")
    add("--rounds", type=int, default=0, metavar="N", help="default: 10, with --reduced 2")
    add("--minutes", type=float, default=20.0, metavar="N", help="default: 20")
    add("--out", type=Path, metavar="DIR", help="default: runs/amp, with --reduced runs/amp_reduced")
    options, settings = parser.parse_known_args(words[len(names) :])
    options.words = list(words)
    options.rounds = options.rounds or (2 if options.reduced else 10)
    options.backend = options.backend or ("aot_eager" if options.reduced else "inductor")
    options.out = options.out or Path("runs/amp_reduced" if options.reduced else "runs/amp")
    check(options, names, settings)
    options.own = bool(settings)
    options.dtypes = DTYPES in names or not names
    options.experiments = chosen(options, names, settings)
    return options


def check(options: argparse.Namespace, names: Sequence[str], settings: Sequence[str]) -> None:
    """Errors: ConfigError."""
    for name in names:
        if name not in NAMES:
            near = nearest_name(name, NAMES)
            raise ConfigError(
                f"there is no experiment {name!r}; "
                + (f"did you mean {near}?" if near else f"there are {', '.join(NAMES)}")
            )
    others = [name for name in names if name != DTYPES]
    if settings and others:
        raise ConfigError(
            f"{' '.join(settings[:2])} is a setting of a task of your own, and {others[0]} has settings; leave one out"
        )
    if FP32 not in options.ways:
        raise ConfigError(f"--ways {' '.join(options.ways)} lacks {FP32}, with which the others are compared; add it")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds} must be at least 1")
    if options.minutes <= 0:
        raise ConfigError(f"--minutes {options.minutes:g} must be above 0")
    if options.batches and min(options.batches) < 1:
        raise ConfigError(f"--batches {min(options.batches)} must be at least 1")


def chosen(options: argparse.Namespace, names: Sequence[str], settings: Sequence[str]) -> list[Experiment]:
    """The experiments to run, in the order of their names in `EXPERIMENTS`."""
    if settings:
        own = own_experiment(settings)
        return [replace(own, batches=tuple(options.batches or ()))]
    modules = [module for name, module in EXPERIMENTS.items() if name in names or not names]
    picked = [module.REDUCED if options.reduced else module.FULL for module in modules]
    return [replace(one, batches=tuple(options.batches)) if options.batches else one for one in picked]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status: 0 measured, 64 an argument or a setting."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> None:
    """What the words ask for. Errors: Failure."""
    options = parse(words)
    device = load_config(options.experiments[0].words).run.device if options.own else "auto"
    with start(RunConfig(device="cpu" if options.reduced else device)) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compilers, schedulers and half precision: they repeat for each run
        logging.getLogger("dist_amp").setLevel(logging.ERROR)
        if world.world_size > 1:
            raise ConfigError(f"the bench amp is for one process, and here are {world.world_size}; leave out torchrun")
        bench, threads = Bench(world, options), torch.get_num_threads()
        torch.set_num_threads(1 if options.reduced else threads)  # its models are too small to share
        gc.freeze()  # modules: they would be looked at in each of many collections
        try:
            bench.run()
        finally:  # stopped by hand, too
            gc.unfreeze()
            torch.set_num_threads(threads)
        banner = f"\n{REDUCED_BANNER.strip('*')}" if options.reduced else ""
        out = options.out
        world.say(f"{banner}\n{out}/amp.md, {out}/amp.json\ntensorboard --logdir {out}/tensorboard")


if __name__ == "__main__":
    sys.exit(main())
