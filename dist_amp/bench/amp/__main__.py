"""python -m dist_amp.bench amp [EXPERIMENT ...]: what mixed precision buys on this device, as tables and pictures.

linear     ten numbers to one, on twenty points: the smallest model that works
mlp        three layers of 4096: mostly matrix products; batch sizes, autocast and scaler each on and off
sinusoid   1 x 1 convolutions that draw a picture of 512 x 512: memory traffic
cnn        two convolutions on 3 x 32 x 32: small operations
gpt        a GPT of 124 M parameters
dtypes     which operations autocast computes in which dtype

Without a name it runs all of them. To measure your own task, give the main job's settings:

    python -m dist_amp.bench amp --task.target my_file:MyTask --train.micro_batch_size 32 --train.steps 100

Each experiment runs in float32, TF32, bfloat16 and float16, with and without the loss scaler, by the main job's
train_step in one process; in training and inference, eager and compiled; next to a hand-written baseline loop. amp.md,
amp.json, pictures and a TensorBoard folder say which precision to use, the speedup, the memory saved, whether the loss
curves agree, and what limits the device. float32 and eager are always measured, since others are compared with
them. What does not fit into --minutes is left out, and named.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import takewhile
from typing import Any

import torch

from dist_amp.bench import harness
from dist_amp.bench.amp.experiments import EXPERIMENTS, MODES, Experiment, own_experiment
from dist_amp.bench.amp.measure import FORMS, FP32, RECIPES, measure
from dist_amp.bench.amp.report import REDUCED_BANNER, chapter, dtypes_text, illustrate, save, verdict_table
from dist_amp.bench.amp.roofline import measure_ceilings
from dist_amp.bench.amp.verdict import verdict
from dist_amp.bench.harness import NO_TIME, Bench, note_of
from dist_amp.commands.command_line import Parser, exit_status
from dist_amp.config.suggest import nearest_name
from dist_amp.errors import ConfigError, Failure
from dist_amp.precision import DTYPES
from dist_amp.runtime.environment import environment_number
from dist_amp.settings import RunConfig
from dist_amp.verify.dtypes import SHORT, dtype_report
from dist_amp.world import World, start

NAMES = (*EXPERIMENTS, "dtypes")
BLOCK_SECONDS = 0.2  # of steps between two clock readings


class AmpBench(Bench):
    """One run of the command."""

    def __init__(self, world: World, options: argparse.Namespace):
        super().__init__("amp", world, options, 0.0 if options.reduced else BLOCK_SECONDS, "triton", "matplotlib")
        self.report |= {"reduced": options.reduced, "experiments": [], "dtypes": {}}
        harness.warm_up_libraries(world.device)

    def run(self) -> int:
        """Run the experiments; returns the exit status."""
        options, self.ceilings, worst = self.options, measure_ceilings(self.world), 0
        self.report["ceilings"] = self.ceilings._asdict()
        if options.dtypes:
            self.report["dtypes"] = self.dtypes()
            self.world.say(f"\n{dtypes_text(self.report['dtypes'])}")
        for experiment in options.experiments:
            if self.seconds_left > 0:
                worst = self.run_one(experiment) or worst
            else:
                self.report["left_out"].append(experiment.name)
                self.world.say(f"\n{experiment.name}\n{NO_TIME}")
            save(self.report, options.out)
        save(self.report, options.out)
        return worst

    def run_one(self, experiment: Experiment) -> int:
        """Measure, judge and show one experiment; returns the exit status."""
        result: dict[str, Any] = {name: getattr(experiment, name) for name in ("name", "about", "arguments")}
        status = 0
        try:
            with redirect_stdout(StringIO()):  # each run introduces itself
                measure(self, experiment, result)
        except Failure as error:  # in the settings, the task or the data: the same for all precisions
            raise type(error)(f"{experiment.name}: {error}") from error
        except Exception as error:
            result["note"], status = note_of(error), 1
            traceback.print_exc()
        harness.release(self.world.device)
        self.report["seconds"] = time.monotonic() - self.started
        self.report["experiments"].append(result)
        if "curves" in result:
            result["verdict"] = verdict(result, experiment, self.ceilings)
            result["picture"] = illustrate(result, self.options.out, self.options.reduced)
        self.world.say(f"\n{chapter(result)}")
        return status

    def dtypes(self) -> dict[str, Any]:
        """What autocast does with two operations, and with the modules of a task."""
        device, rows = self.world.device, []
        x, y = (torch.ones(1024, 1, device=device) for _ in range(2))
        for name, dtype in DTYPES.items():
            with torch.autocast(device.type, dtype=dtype, enabled=name != FP32):
                product, total = x @ y.T, x + y
            rows.append({"precision": name, "x @ y.T": SHORT[product.dtype], "x + y": SHORT[total.dtype]})
        config = (self.options.own or EXPERIMENTS["gpt"].reduced()).config("--run.device", device.type)
        try:
            text = dtype_report(config, self.world).text
        except Exception as error:
            if isinstance(error, Failure):  # in the settings, the task or the data
                raise
            text = note_of(error)  # an operation that can't be traced
        return {"rows": rows, "target": config.task.target, "text": text}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options; arguments that are none of them are the main job's, for the user's task. Errors: ConfigError."""
    parser = Parser("python -m dist_amp.bench amp", __doc__)
    harness.add_choices(parser, precisions=list(RECIPES), modes=MODES, forms=FORMS)
    harness.add_common(parser, 20.0, "runs/amp", "reduced", "runs/amp_reduced")
    options, others = parser.parse_known_args(words)
    harness.with_defaults(options, words)
    names = list(takewhile(lambda word: not word.startswith("-"), others))
    settings = others[len(names) :]
    check(options, names, settings)
    options.own = own_experiment(settings) if settings else None
    options.dtypes = "dtypes" in names or not names
    named = [
        one.reduced() if options.reduced else one for one in EXPERIMENTS.values() if one.name in names or not names
    ]
    options.experiments = [options.own] if options.own and not names else named
    return options


def check(options: argparse.Namespace, names: Sequence[str], settings: Sequence[str]) -> None:
    """Errors: ConfigError."""
    for name in set(names).difference(NAMES):
        hint = nearest_name(name, NAMES) or f"one of {', '.join(NAMES)}"
        raise ConfigError(f"there is no experiment {name!r}; did you mean {hint}?")
    if settings and set(names) - {"dtypes"}:
        setting, name = " ".join(settings[:2]), names[0]
        raise ConfigError(f"{setting} is no option, and {name} has its own settings; leave out one of the two")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 if an experiment failed, 64 for wrong arguments or settings, 65 for the task or its data."""
    return exit_status(measure_all, argv)


def measure_all(words: Sequence[str]) -> int:
    """Run the chosen experiments; returns the exit status. Errors: Failure."""
    options = parse(words)
    harness.single_process("amp", environment_number("WORLD_SIZE", 1))
    try:  # before hours of measuring rather than after
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out} can't be written: {error.strerror}; choose another folder") from None
    run = options.own.config().run if options.own else RunConfig()
    with (
        start(RunConfig(device="cpu" if options.reduced else run.device)) as world,
        harness.quiet_process(options.reduced),
    ):
        banner = REDUCED_BANNER.strip("*") if options.reduced else ""
        world.say(banner)
        bench = AmpBench(world, options)
        status = bench.run()
        world.say(f"\n{banner}\n\n{verdict_table(bench.report)}\n\n{options.out}/amp.md, {options.out}/amp.json")
        world.say(f"tensorboard --logdir {options.out}/tensorboard")
        return status


if __name__ == "__main__":
    sys.exit(main())
