"""What --help and --print_config print, and the JSON Schema of config files: of `settings.Config`.

Each setting's meaning is the docstring below its key, which pydantic reads.
"""

import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from shutil import get_terminal_size
from textwrap import fill
from typing import Any, NoReturn, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from dist_amp.config.load import collect, load_config, names_below, task_in
from dist_amp.config.suggestions import choices_of
from dist_amp.config.task_class import args_dataclass
from dist_amp.config.text import to_toml
from dist_amp.config.values import as_word, schema_of
from dist_amp.distributed.signals import quiet_on_closed_pipe
from dist_amp.errors import ConfigError, nearest_name
from dist_amp.settings import Config, SourceConfig

EXAMPLES = """\
examples:
  dist_amp train --config debug                                     one process
  dist_amp launch --task.target my_file:MyTask --run.dir runs/mine  all GPUs, or two CPU processes
  dist_amp train --help optim                   a section of the settings below, or those on a word
"""
OPTIONS = {
    "-h, --help [SECTION or word]": "Show these settings, or some of them.",
    "--config FILE.toml ...": "TOML files of settings, or shipped ones by name, as demo; later "
    "files override earlier ones, and the command line overrides all of them.",
    "--print_config": "Print all settings as TOML, as a run would use them, and exit.",
    "--use_amp {true,false}": "Short for --precision.use_amp.",
}
METAVARS = {"integer": "INT", "number": "FLOAT", "string": "STR", "boolean": "{true,false}"}
TRAINS = """\
Train the task for train.steps steps; evaluate, save and report on the way; write RUN/summary.json.
torchrun --nproc_per_node=8 -m dist_amp.train, with these arguments, is the same on eight ranks."""

About = dict[str, Any]  # a JSON Schema


def show_if_asked(argv: Sequence[str], prog: str, description: str = TRAINS) -> bool:
    """Print what --help [SECTION or word] or --print_config asks for. Errors: ConfigError."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    asked, words = parser.parse_known_args(argv)
    if asked.help is None and not asked.print_config:
        return False
    with quiet_on_closed_pipe():
        if asked.help is None:
            print(to_toml(load_config(words)), end="")
        else:
            print(help_text(asked.help, words, prog, description), end="")
    return True


def show_and_exit(argv: Sequence[str]) -> NoReturn:
    """Answer --help of dist_amp.train, and end the process."""
    try:
        show_if_asked(argv, "python -m dist_amp.train")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def help_text(asked: str, words: Sequence[str], prog: str, description: str) -> str:
    """The settings of a section or those on a word; "": all. Errors: ConfigError for no such."""
    settings = collect(words)
    sources = names_below("data.sources", settings) or ["NAME"]  # to show the keys of a source
    task = None  # importing the default task takes seconds, so it is left to those who ask for it
    if "task.target" in settings or asked.startswith("task.args"):
        task = task_in(settings)
    about = described(json_schema(task), sources)
    sections = list(dict.fromkeys(key.rpartition(".")[0] for key in about))
    if asked and asked not in sections:
        found = on_word(asked, about)
        if not found and task is None:
            about = described(json_schema(task_in(settings)), sources)
            found = on_word(asked, about)
        if not found:
            hint = f"the sections are {', '.join(sections)}"
            if near := nearest_name(asked, sections):
                hint = f"did you mean {near}?"
            raise ConfigError(f"--help {asked}: no section or setting has this word; {hint}")
        return "".join(entry(f"--{key}", about[key]) for key in found)
    lines = [f"usage: {prog} [--config FILE.toml ...] [--section.key VALUE ...]\n"]
    if not asked:
        lines += [f"\n{EXAMPLES}\n{description.strip()}\n\noptions\n"]
        lines += [entry(option, {"description": OPTIONS[option]}) for option in OPTIONS]
    for section in sections:
        if not asked or f"{section}.".startswith(f"{asked}."):
            lines.append(f"\n{section}\n")
            keys = [key for key in about if key.rpartition(".")[0] == section]
            lines += [entry(f"--{key}", about[key]) for key in keys]
    if task is None and not asked:
        lines.append("\ntask.args\n        --help task.args lists those of the task.\n")
    return "".join(lines)


def on_word(word: str, about: Mapping[str, About]) -> list[str]:
    """The keys whose name or meaning has the word, names first; else as a part of a word."""
    for around in ("(?<![a-z0-9]){}(?![a-z0-9])", "{}"):
        has_word = re.compile("(?i)" + around.format(re.escape(word)))
        found = [key for key in about if has_word.search(f"{key} {entry('', about[key])}")]
        if found:
            return sorted(found, key=lambda key: not has_word.search(key))
    return []


def entry(name: str, about: About) -> str:
    """A setting's lines: its name and values, its meaning and default as wide as the terminal."""
    text = about.get("description", "")
    if "default" in about:
        default = about["default"]
        items = default if isinstance(default, list) else [default]
        text += f" (default: {' '.join(map(as_word, items))})"
    indent = " " * 8
    width = get_terminal_size().columns
    meaning = fill(
        text.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"  {f'{name} {metavar(about)}'.strip()}\n{meaning}\n"


def metavar(about: About) -> str:
    """The values that a setting takes, such as INT|{auto,off}."""
    if "anyOf" in about:
        return "|".join(map(metavar, about["anyOf"]))
    if choices := choices_of(about):
        return f"{{{','.join(choices)}}}"
    if about.get("type") == "array":
        items = about.get("prefixItems") or [about["items"]]
        return " ".join(map(metavar, items)) + " ..." * ("items" in about)
    return METAVARS.get(about.get("type", ""), "")


# ---- the JSON Schema


class Generator(GenerateJsonSchema):
    """Without titles, which repeat the key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(task: type | None = None) -> About:
    """Of config files, as draft 2020-12; with the arguments of a task if it is given."""
    schema = TypeAdapter(Config).json_schema(schema_generator=Generator)
    inherited = TypeAdapter(SourceConfig).json_schema()["properties"]  # pydantic leaves these out
    for table in schema["$defs"].values():
        del table["title"]
        for name, about in table["properties"].items():
            text = about.get("description") or inherited.get(name, {}).get("description", "")
            about["description"] = " ".join(text.split())
    if task is not None:
        args = table_of_args(args_dataclass(task), inspect.getdoc(task) or "")
        schema["$defs"]["TaskConfig"]["properties"]["args"] = args
    schema.pop("description", None)  # not in every release of pydantic
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | schema | {"title": "dist_amp"}


def table_of_args(args: type, doc: str) -> About:
    """A task's arguments: their meanings are in its docstring, each in a line `name: meaning`."""
    properties = {}
    hints = get_type_hints(args, include_extras=True)
    for item in fields(args):
        hint = hints[item.name]
        if is_dataclass(hint):
            properties[item.name] = table_of_args(hint, inspect.getdoc(hint) or "")  # type: ignore[arg-type]
            continue
        about = schema_of(hint)
        if found := re.search(rf"(?m)^\s*{item.name}(?: \(.*\))?: +(.+)$", doc):
            about["description"] = found[1]
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if default is not MISSING:
            about["default"] = TypeAdapter(Any).dump_python(default, mode="json", fallback=str)
        properties[item.name] = about
    return {"type": "object", "properties": properties, "additionalProperties": False}


def described(schema: About, sources: Sequence[str]) -> dict[str, About]:
    """{dotted key: its JSON Schema}, of the keys of these sources of a mixture too."""

    def walk(table: About, prefix: str) -> Iterator[tuple[str, About]]:
        for name, about in table["properties"].items():
            key = f"{prefix}{name}"
            if "$ref" in about:
                about = schema["$defs"][about["$ref"].rpartition("/")[2]]
            if "properties" in about:
                yield from walk(about, f"{key}.")
            elif key == "data.sources":
                kind = about["additionalProperties"]["$ref"].rpartition("/")[2]
                for source in sources:
                    yield from walk(schema["$defs"][kind], f"{key}.{source}.")
            elif about.get("type") or "anyOf" in about or "enum" in about or prefix == "task.args.":
                yield key, about

    return dict(walk(schema, ""))
