"""dist_amp COMMAND ...: the same as python -m dist_amp.COMMAND."""

import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from dist_amp import __version__
from dist_amp.config.load import collect, config_of
from dist_amp.distributed.signals import end_on_ctrl_c, quiet_on_closed_pipe
from dist_amp.errors import ConfigError, nearest_name
from dist_amp.files import missing

COMMANDS = {
    "new": "create your own project: a package for your task, and dist_amp with chosen features",
    "update": "update a project to the newest version of dist_amp, by a git merge",
    "adopt": "add optional features to a project, or remove them, by a git merge",
    "train": "train a task in this process, or as a rank under torchrun",
    "demo": "a first run: train a small GPT on Python's own source; takes launch's arguments",
    "launch": "train on all GPUs of this machine, or on several machines; takes torchrun's options",
    "verify": "check, with your task, that every strategy and precision computes the same step",
    "schema": "print the JSON Schema of config files, for completion and checks in an editor",
    "plan": "predict a config's memory, traffic and time per rank on any number of GPUs",
    "tokenize": "pre-tokenize a dataset into memory-mapped files",
    "export": "write a checkpoint's model as one safetensors file",
    "sample": "generate a sample from a trained model",
    "board": "show a run, or a folder of runs, in TensorBoard with the main charts pinned",
    "runs": "list the runs in a folder: state, steps, losses, and settings that differ",
    "plot": "plot a metric of one or several runs to an image file",
    "report": "write a run's report.html: curves, settings, ranks and the sample",
    "replay": "repeat a run's steps in one process, and inspect one of them",
    "diff": "compare two runs: settings, and the first step where they diverge",
    "doctor": "check this machine, or all ranks of a job: versions, devices, network, limits",
    "follow": "copy a run's metrics to wandb, trackio or mlflow, live or afterwards",
}
# Commands that take the settings of dist_amp.train.
WITH_SETTINGS = ("train", "demo", "launch", "verify", "plan", "tokenize", "export", "sample")


def main() -> int:
    name, *rest = sys.argv[1:] or ["--help"]
    # The package also finds modules in commands/: see __path__ in dist_amp/__init__.py.
    commands = {
        command: text for command, text in COMMANDS.items() if find_spec(f"dist_amp.{command}")
    }
    if name in ("-h", "--help"):
        width = max(map(len, commands))
        with quiet_on_closed_pipe():
            print("usage: dist_amp COMMAND [ARGUMENTS]   (or python -m dist_amp.COMMAND)\n")
            print("\n".join(f"  {command:<{width}}  {text}" for command, text in commands.items()))
            print("\ndist_amp COMMAND --help explains a command and its arguments.")
            print("dist_amp --version prints the versions of dist_amp, torch and Python.")
        return 0
    if name == "--version":
        print(f"dist_amp {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
        return 0
    if name not in commands:
        hint = f"the commands are {', '.join(commands)}"
        if similar := nearest_name(name, commands):
            hint = f"did you mean {similar}?"
        if name in COMMANDS and name != "new":
            hint = missing(f"commands.{name}")
        print(f"error: there is no command {name}; {hint}", file=sys.stderr)
        return 64
    end_on_ctrl_c()  # before torch's import, which takes seconds
    try:
        if name in WITH_SETTINGS and "RANK" not in os.environ:  # once, not on each rank
            check_early(rest, has_options=name != "train")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sys.argv = [f"dist_amp {name}", *rest]
    runpy.run_module(f"dist_amp.{name}", run_name="__main__", alter_sys=True)
    return 0


def check_early(words: Sequence[str], has_options: bool) -> None:
    """Check settings without importing torch. has_options: skip the command's own options."""
    if any(word.replace("-", "_") in ("_h", "__help", "__print_config") for word in words):
        return
    if has_options:
        starts = [at for at, word in enumerate(words) if re.match(r"--(config|.*\.)", word)]
        ends = [at for at, word in enumerate(words) if word.startswith(("-m", "--module"))]
        words = words[min(starts, default=len(words)) : min(ends, default=len(words))]
    settings = {
        key: setting
        for key, setting in collect(words).items()
        if not key.startswith("task.args.") and ("." in key or not has_options)
    }
    try:
        config_of(settings, object)
    except ConfigError as error:
        if not str(error).endswith("--help lists every key"):  # may be close to a task.args key
            raise


if __name__ == "__main__":
    sys.exit(main())
