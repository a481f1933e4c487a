"""What --help, --print_config and shell completion print."""

import ast
import io
import re
from argparse import ArgumentParser
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Any, get_type_hints

import tyro

from dist_amp.config.load import collect, load_config, schema, source_names, task_in
from dist_amp.config.text import to_toml
from dist_amp.distributed.signals import quiet_on_closed_pipe
from dist_amp.errors import ConfigError, nearest_name

EXAMPLES = """\
examples:
  dist_amp train --config debug                                     one process
  dist_amp launch --task.target my_file:MyTask --run.dir runs/mine  all GPUs, or two CPU processes
  dist_amp train --help optim                   a section of the settings below, or those on a word
"""

TYRO = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)

CONFIG_HELP = """TOML files of settings, or shipped ones by name, as demo; later files override \
earlier ones, and the command line overrides all of them."""
PRINT_CONFIG_HELP = "Print all settings as TOML, as a run would use them, and exit."
FILES = tyro.conf.arg(metavar="FILE.toml ...", help_behavior_hint="", help=CONFIG_HELP)
FLAG = tyro.conf.arg(metavar="", help_behavior_hint="", help=PRINT_CONFIG_HELP)


@dataclass(frozen=True)
class Options:
    """Options of the command line that are not settings."""

    config: Annotated[tuple[Path, ...], FILES] = ()
    print_config: Annotated[bool, FLAG] = False
    use_amp: Annotated[bool, tyro.conf.arg(help="Short for --precision.use_amp.")] = True


def show_if_asked(argv: Sequence[str], prog: str, description: str) -> bool:
    """Print what --help [SECTION or word] or --print_config asks for. Errors: ConfigError."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--print_config", "--print-config", action="store_true")
    asked, words = parser.parse_known_args(argv)
    section = asked.help
    if section is None and not asked.print_config:
        return False
    with quiet_on_closed_pipe():
        if section is None:
            print(to_toml(load_config(words)), end="")
            return True
        about = ""
        if not section:
            about = f"{EXAMPLES}\n{description.strip()}"
        settings = collect(words)
        sources = source_names(settings) or ("NAME",)  # a table to show the keys of a source
        full = schema(task_in(settings), sources)
        sections = sections_of(full)
        if not section or section in sections:
            print(show_help(full, prog, about, section))
        else:
            print(settings_about(section, show_help(full, prog, ""), sections), end="")
    return True


def sections_of(schema: type, prefix: str = "") -> list[str]:
    """Such as optim and precision.scaler."""
    names = []
    for name, hint in get_type_hints(schema).items():
        if is_dataclass(hint):
            names += [f"{prefix}{name}", *sections_of(hint, f"{prefix}{name}.")]  # type: ignore[arg-type]
    return names


def settings_about(word: str, text: str, sections: Sequence[str]) -> str:
    """The settings in --help's text whose name or meaning has the word, names first.

    Without any, those that have it as a part of a word. Errors: ConfigError if there are none.
    """
    settings = re.findall(r"(?m)^  --.*\n(?: {4,}.*\n)*", f"{text}\n")
    for around in ("(?<![a-z0-9]){}(?![a-z0-9])", "{}"):
        has_word = re.compile("(?i)" + around.format(re.escape(word)))
        if found := [setting for setting in settings if has_word.search(setting)]:
            return "".join(sorted(found, key=lambda found: not has_word.search(found.split()[0])))
    hint = f"the sections are {', '.join(sections)}"
    if near := nearest_name(word, sections):
        hint = f"did you mean {near}?"
    raise ConfigError(f"--help {word}: no section or setting has this word; {hint}")


def show_help(schema: type, prog: str, description: str, section: str = "") -> str:
    """The text of `--help`: every key with type, default and meaning."""
    shown = only(schema, section)
    if not section:
        shown = make_dataclass("Settings", [], bases=(schema, Options), frozen=True)
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(
            shown,
            args=["--help"],
            prog=prog,
            description=description,
            use_underscores=True,
            config=TYRO,
        )
    # tyro keeps a docstring's line breaks, and adds its own.
    lines = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return re.sub(r"(?m)^(  -\S.*?)( {2,}|\n +)(\S.*(?:\n {8,}\S.*)*)", rewrapped, lines)


def rewrapped(setting: re.Match[str]) -> str:
    """A setting with its meaning in lines as wide as the terminal."""
    name, between, meaning = setting.groups()
    indent = " " * len((name + between).rpartition("\n")[2])
    lines = fill(
        " ".join(meaning.split()),
        get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return name + between + lines.lstrip()


def only(schema: type, section: str) -> Any:
    """A dataclass with this section of the schema alone, at its place; "": with all."""
    if not section:
        return schema
    name, _, inner = section.partition(".")
    part = only(get_type_hints(schema)[name], inner)
    return make_dataclass("Section", [(name, part, field(default_factory=part))])


def completion(
    commands: Mapping[str, str], with_settings: Collection[str], prog: str, shell: str
) -> str:
    """A script for bash, zsh or fish: completes `prog COMMAND --key`. commands: {name: help}."""
    settings = (type(load_config([], {})), Options)
    schemas: dict[str, Any] = {}
    for name, meaning in commands.items():
        shown = settings * (name in with_settings)
        about = {"__doc__": meaning}
        schemas[name] = make_dataclass("Settings", [], bases=shown, frozen=True, namespace=about)
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            schemas,
            prog=prog,
            use_underscores=True,
            config=TYRO[:1],
            args=["--tyro-print-completion", shell],
        )
    return mended(text.getvalue())


def mended(script: str) -> str:
    """tyro's script with paths after --config, and meanings of one line, as shells take them."""
    found = re.search(r"(?m)^COMPLETION_SPEC = (.*)$", script)
    if found is None:  # another release of tyro
        return script
    spec = ast.literal_eval(found[1])
    for command in spec["subcommands"].values():
        for option in command["options"]:
            option["description"] = " ".join(option["description"].split())
            if "--config" in option["flags"]:
                option["type"] = "path"
    script = script.replace(found[1], repr(spec))
    return script.replace("complete -F", "complete -o filenames -F")  # folders end with a slash
