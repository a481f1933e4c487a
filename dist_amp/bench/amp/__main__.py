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
import shlex
import sys
import tempfile
import time
import traceback
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
from dist_amp.bench.amp.measure import EAGER, FORMS, Effort, measure
from dist_amp.bench.amp.pictures import illustrate
from dist_amp.bench.amp.recipes import FP32, RECIPES
from dist_amp.bench.amp.report import LEGEND, REDUCED_BANNER, busy_machine, save, terminal
from dist_amp.bench.amp.roofline import Ceilings, measure_ceilings
from dist_amp.bench.amp.verdict import add_parity, verdict
from dist_amp.bench.machine import about
from dist_amp.bench.report import rows_of_markdown
from dist_amp.bench.timing import prime, release, why_not
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError, Failure
from dist_amp.runtime.environment import environment_number
from dist_amp.settings import RunConfig
from dist_amp.world import World, start

EXPERIMENTS = {"linear": linear, "mlp": mlp, "sinusoid": sinusoid, "cnn": cnn, "gpt": gpt}
DTYPES = "dtypes"
NAMES = (*EXPERIMENTS, DTYPES)
CHOICES: dict[str, Sequence[str]] = {"precisions": list(RECIPES), "modes": MODES, "forms": FORMS}
PACKAGES = ("triton", "matplotlib")
SPARE_SECONDS = 20  # of --minutes, for the pictures
BLOCK_SECONDS = 0.2  # of steps between two clocks
STOPPED = 130  # the exit status after Ctrl-C, as shells have it


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
            options.precisions,
            options.rounds,
            0.0 if options.reduced else BLOCK_SECONDS,
            self.began + options.minutes * 60 - SPARE_SECONDS,
        )
        self.report: dict[str, Any] = {
            "reduced": options.reduced,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"python -m dist_amp.bench amp {shlex.join(options.words)}",
            **about(world.device, *PACKAGES),
            "rounds": options.rounds,
            "seconds": 0.0,
            "ceilings": {},
            "experiments": [],
            "dtypes": {},
            "left_out": [],
        }

    def run(self) -> int:
        """The exit status."""
        if self.options.reduced:
            self.world.say(REDUCED_BANNER.strip("*"))
        prime(self.world.device)
        ceilings = measure_ceilings(self.world)
        self.report["ceilings"] = asdict(ceilings)
        worst = 0
        if self.options.dtypes:
            self.show_dtypes()
        for experiment in self.experiments:
            if self.effort.seconds_left < 0:
                self.report["left_out"].append(experiment.name)
                self.world.say(f"\n{experiment.name}\nleft out: no time")
                continue
            told, pictures, status = self.tell(experiment, ceilings)
            self.report["experiments"].append(told)
            self.report["seconds"] = time.monotonic() - self.began
            self.world.say(terminal(told))
            told["files"] = illustrate(told, experiment, pictures, self.options.out, self.options.reduced)
            self.world.say("\n".join(told["files"]))
            save(self.report, self.experiments, self.options.out)
            worst = worst or status
            if status == STOPPED:
                break
        save(self.report, self.experiments, self.options.out)
        return worst

    def tell(self, experiment: Experiment, ceilings: Ceilings) -> tuple[dict[str, Any], dict[str, Tensor], int]:
        """The experiment's figures and verdict, and what its models draw; or why it has none, and the exit status."""
        began, status = time.monotonic(), 0
        told: dict[str, Any] = {"name": experiment.name}
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):  # each run's own introduction
            try:
                measure(self.effort, experiment, told)
            except Failure as error:  # in the settings, the task or the data: all precisions' alike
                raise type(error)(f"{experiment.name}: {error}") from error
            except KeyboardInterrupt:  # what is told by then stays
                told["cant"], status = "stopped by hand", STOPPED
            except Exception as error:
                text, status = traceback.format_exc(), 1
                told["cant"], told["traceback"] = why_not(error), text.splitlines()
                print(text, file=sys.stderr)
        pictures: dict[str, Tensor] = told.pop("pictures", {})
        if "curves" in told:
            add_parity(told)
            told["verdict"] = verdict(told, experiment, ceilings)
        release(self.world.device)
        told["took_seconds"] = time.monotonic() - began
        return told, pictures, status

    def show_dtypes(self) -> None:
        rows = dtypes.demonstrate(self.world.device)
        shown = [self.options.own or gpt.REDUCED]
        configs = [experiment.config(*self.effort.words) for experiment in shown]
        told = [dtypes.operations(config, self.world) for config in configs]
        self.report["dtypes"] = {"about": dtypes.__doc__, "rows": rows, "operations": told}
        head = list(rows[0])
        self.world.say(f"\n{DTYPES}\n" + rows_of_markdown(head, [list(row.values()) for row in rows], left=len(head)))
        for one in told:
            self.world.say(f"\n{one['target']}\n{one['text']}")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; what they don't know are the main job's settings, of a task of one's own. Errors: ConfigError."""
    parser = Parser("python -m dist_amp.bench amp", __doc__)
    add = parser.add_argument
    add("--reduced", action="store_true", help="small models on a CPU: tries every path; its timings mean nothing")
    for name, choices in CHOICES.items():
        text = f"of {', '.join(choices)}; default: all"
        add(f"--{name}", nargs="+", choices=choices, default=list(choices), metavar="NAME", help=text)
    add("--batches", nargs="+", type=int, metavar="N", help="more micro-batch sizes; default: the experiment's own")
    add("--backend", help="of torch.compile; default: inductor, with --reduced aot_eager")
    add("--rounds", type=int, metavar="N", help="default: 10, with --reduced 2")
    add("--minutes", type=float, default=20.0, metavar="N", help="default: 20")
    add("--out", type=Path, metavar="DIR", help="default: runs/amp, with --reduced runs/amp_reduced")
    options, others = parser.parse_known_args(words)
    names = list(takewhile(lambda word: not word.startswith("-"), others))
    settings = others[len(names) :]
    if options.rounds is None:
        options.rounds = 2 if options.reduced else 10
    options.backend = options.backend or ("aot_eager" if options.reduced else "inductor")
    options.out = options.out or Path("runs/amp_reduced" if options.reduced else "runs/amp")
    check(options, names, settings)
    options.words = list(words)
    options.own = own_experiment(settings) if settings else None
    options.dtypes = DTYPES in names or not names
    options.experiments = chosen(options, names)
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
    for word in settings:
        option = word.partition("=")[0]
        if option.startswith("--") and "." not in option and option not in ("--config", "--use_amp"):
            near = nearest_name(option, [f"--{name}" for name in vars(options)])
            hint = f"; did you mean {near}?" if near else "; see python -m dist_amp.bench amp --help"
            raise ConfigError(f"there is no option {option}{hint}")
    if settings and others:
        raise ConfigError(
            f"{' '.join(settings[:2])} is a setting of a task of your own, and {others[0]} has its own settings; leave "
            "out the name or the setting"
        )
    for option, needed in (("precisions", FP32), ("forms", EAGER)):
        given = getattr(options, option)
        if needed not in given:
            raise ConfigError(f"--{option} {' '.join(given)} lacks {needed}, with which others are compared; add it")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds} must be at least 1")
    if not options.minutes > 0:
        raise ConfigError(f"--minutes {options.minutes:g} must be above 0")
    if options.batches and min(options.batches) < 1:
        raise ConfigError(f"--batches {min(options.batches)} must be at least 1")


def check_folder(folder: Path) -> None:
    """Before hours of measuring rather than after. Errors: ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {folder} can't be written: {error.strerror}; name another folder") from None


def chosen(options: argparse.Namespace, names: Sequence[str]) -> list[Experiment]:
    """The experiments to run, in the order of their names in `EXPERIMENTS`."""
    if options.own:
        return [] if names else [replace(options.own, batches=tuple(sorted(options.batches or ())))]
    modules = [module for name, module in EXPERIMENTS.items() if name in names or not names]
    picked = [module.REDUCED if options.reduced else module.FULL for module in modules]
    return [replace(one, batches=tuple(sorted(options.batches))) if options.batches else one for one in picked]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status.

    0 measured, 64 an argument or a setting, 65 the task or its data, 1 an experiment that failed, 130 stopped by hand.
    """
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> int:
    """What the words ask for; returns the exit status. Errors: Failure."""
    options = parse(words)
    if (ranks := environment_number("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"the bench amp is for one process, and here are {ranks}; leave out torchrun")
    check_folder(options.out)
    device = (options.own.config().run if options.own else RunConfig()).device
    with start(RunConfig(device="cpu" if options.reduced else device)) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compilers, schedulers and half precision: they repeat for each run
        log, bench, threads = logging.getLogger("dist_amp"), Bench(world, options), torch.get_num_threads()
        level = log.level
        log.setLevel(logging.ERROR)
        torch.set_num_threads(1 if options.reduced else threads)  # its models are too small to share
        gc.freeze()  # modules: they would be looked at in each of many collections
        try:
            status = bench.run()
        finally:  # stopped by hand, too
            gc.unfreeze()
            torch.set_num_threads(threads)
            log.setLevel(level)
        banner = f"\n{REDUCED_BANNER.strip('*')}" if options.reduced else ""
        out = options.out
        world.say(LEGEND + (f"\n{busy}" if (busy := busy_machine(bench.report)) else ""))
        world.say(f"{banner}\n{out}/amp.md, {out}/amp.json\ntensorboard --logdir {out}/tensorboard")
        return status


if __name__ == "__main__":
    sys.exit(main())
