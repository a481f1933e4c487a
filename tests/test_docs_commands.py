"""The commands in the documentation parse: programs, files and settings are real."""

import re
import shlex

import pytest
from conftest import ROOT

from dist_amp.commands.__main__ import COMMANDS, OPTIONS, WITH_SETTINGS, check_early
from dist_amp.config.load import load_config
from dist_amp.config.suggestions import check_unknown

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = [*sorted((ROOT / "configs").glob("*.toml")), *sorted((ROOT / "launch").iterdir())]
PROGRAMS = {
    *("python", "python3", "torchrun", "dist_amp", "bash", "source", "pip"),
    *("sbatch", "kubectl", "docker", ".venv/bin/ruff"),
}
# Stand in for the reader's own files.
STAND_INS = {"my_file:TinyRegression": "tiny:Tiny", "my_file:MyTask": "tiny:Tiny"}
STAND_INS["C.toml"] = "configs/demo.toml"
SETTINGS_ALONE = re.compile(
    r"-m dist_amp\.train|gan\.py|launch/(?:demo|one_node)\.sh|slurm\.sbatch|-m benchmarks\.\w+"
)


def commands_of_page(text):
    """The commands of blocks without a language, or of bash; of console those after a $."""
    for language, block in re.findall(r"(?ms)^ *```(\w*)\n(.*?)^ *```", text):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if language == "console":
            yield from (line[2:] for line in lines if line.startswith("$ "))
        elif language in ("", "bash"):
            yield from (line.strip() for line in lines if line.strip())


def commands_of_header(text):
    """The comment lines, at a file's start, that begin with a program."""
    header = re.match(r"(?:#.*\n)*", text)[0]
    for line in re.findall(r"(?m)^#\s+(\S.*)$", header):
        program = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line).split()[0]
        if program in PROGRAMS:
            yield line


def all_commands():
    found = [line for page in PAGES for line in commands_of_page(page.read_text())]
    found += [line for path in FILES for line in commands_of_header(path.read_text())]
    return sorted({re.sub(r"\s+#\s.*", "", line) for line in found})


@pytest.mark.parametrize("command", all_commands())
def test_a_command_parses_and_its_settings_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [STAND_INS.get(word, word) for word in shlex.split(command)]
    while re.match(r"[A-Z_]+=", words[0]):
        del words[0]
    assert words[0] in PROGRAMS, f"{words[0]}: add it to PROGRAMS, or label the block as `text`"
    if match := re.match(r"(?:dist_amp |python -m dist_amp\.)(\w+)", command):
        name = match[1]
        arguments = shlex.split(command[match.end() :])
        assert name in COMMANDS
        if name in WITH_SETTINGS:
            check_early(arguments, has_options=name != "train")
        check_unknown(arguments, OPTIONS.get(name, "").split())
    for word in words:
        if re.match(r"(?:launch|configs|tests)/[\w./]+$", word):
            assert (ROOT / word).exists(), word
    if match := SETTINGS_ALONE.search(command):
        settings = shlex.split(command[match.end() :])
        load_config([STAND_INS.get(word, word) for word in settings], environ={})
