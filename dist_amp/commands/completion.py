"""dist_amp --completion bash|zsh|fish: a script that completes commands, settings and torchrun's options."""

from collections.abc import Mapping
from dataclasses import field, make_dataclass

from torch.distributed.run import get_args_parser

from dist_amp.config.load import schema
from dist_amp.config.parse import command_line_of, completion
from dist_amp.fast.elastic import torchrun_options
from dist_amp.runtime.process import quiet_on_closed_pipe
from dist_amp.settings import TaskConfig

WITH_SETTINGS = ("train", "verify", "plan", "tokenize", "export", "sample")  # those of dist_amp.train


def print_completion(commands: Mapping[str, str], shell: str) -> None:
    """Print the script. commands: {name: what it does}."""
    settings = schema(TaskConfig.target)
    torchruns = dict.fromkeys(action.dest for action in torchrun_options(get_args_parser()).values())
    fields = [(name, str, field(default="")) for name in torchruns]
    launch = make_dataclass("Launch", fields, bases=(settings,), frozen=True)
    schemas = {name: make_dataclass("Arguments", [], namespace={"__doc__": what}) for name, what in commands.items()}
    for name in {"launch", *WITH_SETTINGS} & commands.keys():
        schemas[name] = command_line_of(launch if name == "launch" else settings, commands[name])
    with quiet_on_closed_pipe():
        print(completion(schemas, "dist_amp", shell))
