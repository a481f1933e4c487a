"""The output of --help and --print_config."""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size
from textwrap import fill, indent
from typing import Any, NoReturn

from dist_amp.config.load import collect, load_config, task_in
from dist_amp.config.schema import Schema, described, json_schema
from dist_amp.config.text import to_toml
from dist_amp.distributed.signals import quiet_on_closed_pipe
from dist_amp.errors import ConfigError

EXAMPLES = """\
examples:
  dist_amp train --config debug                                     one process
  dist_amp launch --task.target my_file:MyTask --run.dir runs/mine  all GPUs, or two CPU processes
  dist_amp train --help optim                   a section, or all settings with this name
"""
OPTIONS = {
    "-h, --help [SECTION or name]": "Show all settings, one section, or settings by name.",
    "--config FILE.toml ...": "TOML files of settings, or names of shipped ones, such as demo; "
    "later files override earlier ones, and the command line overrides all of them.",
    "--print_config": "Print all settings as TOML, with the values a run would use, and exit.",
    "--use_amp {true,false}": "Short for --precision.use_amp.",
}
METAVARS = {"integer": "INT", "number": "FLOAT", "string": "STR", "boolean": "{true,false}"}
DESCRIPTION = """\
Train the task for train.steps steps; evaluate, save and report on the way; write RUN/summary.json.
For eight ranks: torchrun --nproc_per_node=8 -m dist_amp.train, with the same arguments."""


def show_if_asked(argv: Sequence[str], prog: str, description: str = DESCRIPTION) -> bool:
    """Print what --help [SECTION or name] or --print_config asks for. Raises ConfigError."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    asked, words = parser.parse_known_args(argv)
    if asked.help is None and not asked.print_config:
        return False
    with quiet_on_closed_pipe():
        if asked.help is None:
            print(to_toml(load_config(words)), end="")
        elif asked.help:
            print(help_on(asked.help, words), end="")
        else:
            print(help_text(words, prog, description), end="")
    return True


def show_and_exit(argv: Sequence[str]) -> NoReturn:
    """Answer --help of dist_amp.train, and end the process."""
    try:
        show_if_asked(argv, "python -m dist_amp.train")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def help_text(words: Sequence[str], prog: str, description: str) -> str:
    """Help on all settings, and on the task's arguments if the words set task.target."""
    settings = collect(words)
    task = task_in(settings) if "task.target" in settings else None  # importing it takes seconds
    about = described(json_schema(task))
    text = f"usage: {prog} [--config FILE.toml ...] [--section.key VALUE ...]\n\n{EXAMPLES}\n"
    text += f"{description.strip()}\n\noptions\n"
    text += "".join(entry(option, {"description": OPTIONS[option]}) for option in OPTIONS)
    section = ""
    for key in about:
        if section != key.rpartition(".")[0]:
            section = key.rpartition(".")[0]
            text += f"\n{section}\n"
        text += entry(f"--{key}", about[key])
    if task is None:
        text += "\ntask.args\n        --help task.args lists the task's arguments.\n"
    return text


def help_on(topic: str, words: Sequence[str]) -> str:
    """Help on the section `topic`, or the settings with it in their names. Raises ConfigError."""
    settings = collect(words)
    # Import a task only if it is needed, because the default one takes seconds.
    with_task = "task.target" in settings or topic.startswith("task.args")
    about = described(json_schema(task_in(settings) if with_task else None))
    found = [key for key in about if key.startswith(f"{topic}.")]
    found = found or [key for key in about if topic in key]
    if not found:
        sections = dict.fromkeys(key.rpartition(".")[0] for key in about)
        raise ConfigError(
            f"--help {topic}: no section or setting has this name; the sections are "
            f"{', '.join(sections)}"
        )
    return "".join(entry(f"--{key}", about[key]) for key in found)


def entry(name: str, about: Schema) -> str:
    """A setting's name and values, then its meaning and default, wrapped to the terminal."""
    text = about.get("description", "")
    if "default" in about:
        default = about["default"]
        items = default if isinstance(default, list) else [default]
        text += f" (default: {' '.join(map(as_word, items))})"
    meaning = indent(fill(text.strip(), get_terminal_size().columns - 8), " " * 8)
    return f"  {f'{name} {metavar(about)}'.strip()}\n{meaning}\n"


def metavar(about: Schema) -> str:
    """The values that a setting accepts, as a text such as INT|{auto,off}."""
    if "anyOf" in about:
        return "|".join(map(metavar, about["anyOf"]))
    if choices := choices_of(about):
        return f"{{{','.join(choices)}}}"
    if about.get("type") == "array":
        items = about.get("prefixItems") or [about["items"]]
        return " ".join(map(metavar, items)) + " ..." * ("items" in about)
    return METAVARS.get(about.get("type", ""), "")


def choices_of(about: Mapping[str, Any]) -> list[str]:
    values = about.get("enum", [about["const"]] if "const" in about else [])
    return list(map(as_word, values))


def as_word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
