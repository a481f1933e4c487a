"""What --help, --print_config and shell completion print."""

import ast
import io
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from dist_amp.config.load import collect, load_config, schema, source_names, target_in, to_toml
from dist_amp.config.task_class import find_task
from dist_amp.distributed.signals import quiet_on_closed_pipe
from dist_amp.errors import ConfigError, nearest_name

EXAMPLES = """\
examples:
  dist_amp train --config sinusoid                                  one process
  dist_amp launch --task.target my_file:MyTask --run.dir runs/mine  all GPUs, or two CPU processes
  dist_amp train --help optim                   a section of the settings below, or those on a word
"""

TYRO = (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands)

CONFIG_HELP = """TOML files of settings, or shipped ones by name, as demo; later files override \
earlier ones, and the command line overrides all of them."""
PRINT_CONFIG_HELP = "Print all settings as TOML, as a run would use them, and exit."
FILES = tyro.conf.arg(metavar="FILE.toml ...", help_behavior_hint="", help=CONFIG_HELP)
FLAG = tyro.conf.arg(metavar="", help_behavior_hint="", help=PRINT_CONFIG_HELP)


@dataclass
class Options:
    """Options of the command line that are not settings."""

    config: Annotated[tuple[Path, ...], FILES] = ()
    print_config: Annotated[bool, FLAG] = False
    use_amp: Annotated[bool, tyro.conf.arg(help="Short for --precision.use_amp.")] = True


def show_if_asked(argv: Sequence[str], prog: str, description: str) -> bool:
    """Print what --help [SECTION or word] or --print_config asks for. Errors: ConfigError."""
    words, asked, section = _without_questions(argv)
    if not asked:
        return False
    with quiet_on_closed_pipe():
        if "help" not in asked:
            print(to_toml(load_config(words)), end="")
            return True
        about = ""
        if not section:
            about = f"{EXAMPLES}\n{description.strip()}"
        settings = collect(words)
        sources = source_names(settings) or ("NAME",)  # a table to show the keys of a source
        full = schema(find_task(target_in(settings)), sources)
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


def _without_questions(argv: Sequence[str]) -> tuple[list[str], set[str], str]:
    """(the other words, which of help and print_config are given, what follows --help or "")."""
    names = {"_h": "help", "__help": "help", "__print_config": "print_config"}
    words = []
    asked: set[str] = set()
    section = before = ""
    for word in argv:
        name = names.get(word.replace("-", "_"), "")
        if name:
            asked.add(name)
        elif before == "help" and not word.startswith("-"):
            section = word
        else:
            words.append(word)
        before = name
    return words, asked, section


def show_help(schema: type, prog: str, description: str, section: str = "") -> str:
    """The text of `--help`: every key with type, default and meaning."""
    shown = _fields_of(schema, section)
    if not section:
        shown = [*_fields_of(Options), *shown]
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        tyro.cli(
            make_dataclass("Settings", shown),
            args=["--help"],
            prog=prog,
            description=description,
            use_underscores=True,
            config=TYRO,
        )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def completion(
    commands: Mapping[str, str], with_settings: Collection[str], prog: str, shell: str
) -> str:
    """A script for bash, zsh or fish: completes `prog COMMAND --key`. commands: {name: help}."""
    settings = [*_fields_of(Options), *_fields_of(type(load_config([], {})))]
    schemas: dict[str, Any] = {}
    for name, meaning in commands.items():
        shown = settings * (name in with_settings)
        schemas[name] = make_dataclass("Settings", shown, namespace={"__doc__": meaning})
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


def _fields_of(schema: type, section: str = "") -> list[tuple[str, Any, Any]]:
    """(name, type, field) of a dataclass, or of a section of it."""
    name, _, inner = section.partition(".")
    hints = get_type_hints(schema, include_extras=True)
    shown = []
    for item in fields(schema):
        if name in ("", item.name):
            copied = field(default=item.default, default_factory=item.default_factory)  # type: ignore[call-overload]
            shown.append((item.name, hints[item.name], copied))
    if inner:
        only = make_dataclass("Section", _fields_of(hints[name], inner))
        return [(name, only, field(default_factory=only))]
    return shown
