"""The commands in the documentation run; of those that can't, programs, files and options exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import commands_in_docs
import pytest
from commands_in_docs import HUGGING_FACE, PROGRAMS, RUNS, STAND_INS, blocks, needs, small
from conftest import ROOT
from forked import Forked, finish
from torch.distributed.run import get_args_parser

from benchmarks.__main__ import main as benchmarks
from dist_amp.commands.__main__ import COMMANDS, OPTIONS, WITH_SETTINGS, check_early
from dist_amp.config.load import load_config
from dist_amp.config.suggestions import check_unknown

BLOCKS = blocks()
EVERY_COMMAND = sorted({command for block in BLOCKS for command in block.commands})
SETTINGS_ALONE = re.compile(
    r"-m dist_amp\.train|gan\.py|launch/(?:demo|one_node|many_nodes)\.sh|slurm\.sbatch"
    r"|-m benchmarks\.\w+|-m benchmarks (?:data|activations)"
)
# `dist_amp ...`, `python -m dist_amp.NAME ...` or `python -m benchmarks ...`, and no shell syntax.
OF_THIS_PACKAGE = re.compile(r"(?:python -m )?(dist_amp[ .]|benchmarks(?= |$))([^&;|>()]*)$")
NOT_COPIED = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache", "runs", "build")


# ---- every command


def test_the_tables_name_no_command_that_is_gone():
    for table in (commands_in_docs.NEEDS, commands_in_docs.LESS_WORK):
        for pattern in table:
            assert any(re.match(pattern, command) for command in EVERY_COMMAND), pattern
    for theirs in STAND_INS:
        assert any(theirs in command for command in EVERY_COMMAND), theirs
    for run in RUNS:
        assert any(run in command.split() for command in EVERY_COMMAND), run


def test_a_command_that_is_not_run_is_covered_by_the_tests_that_the_table_names():
    for what in commands_in_docs.NEEDS.values():
        for path in re.findall(r"tests/[\w/]+\.py", what):
            assert (ROOT / path).exists(), path


def options_of(words):
    """Options that are no settings, which have a section and a dot."""
    options = [word.partition("=")[0] for word in words]
    return [word for word in options if re.match(r"--\w[\w-]*$", word) and word != "--config"]


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_a_command_parses_and_its_files_options_and_settings_exist(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    command = command.rstrip(")").replace("my_file:TinyRegression", "tiny:Tiny")
    command = command.replace("my_file:MyTask", "tiny:Tiny").replace("C.toml", "configs/demo.toml")
    words = [word for word in shlex.split(command) if word not in ("...", "ARGS")]
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
        load_config([word for word in settings if word not in ("...", "ARGS")], environ={})
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:] if len(words) > 1 else [])
    if words[:3] == ["python", "-m", "benchmarks"] and len(words) > 3:
        assert benchmarks([words[3], "--help"]) == 0
        told = capsys.readouterr().out
        assert [option for option in options_of(words) if option not in told] == []
    if words[1:2] == ["launch/ray_train.py"]:
        text = (ROOT / "launch/ray_train.py").read_text()
        missing = [word for word in options_of(words) if f'"{word}"' not in text]
        assert [word for word in missing if "." not in word] == []


# ---- those that can run here


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the clone, with the files and runs of a reader who has followed the pages."""
    folder = tmp_path_factory.mktemp("docs") / "clone"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "my_file.py").write_text(code_with("class TinyRegression", "README.md"))
    (folder / "gan.py").write_text(code_with("def train(world", "docs/own_loop.md"))
    (folder / "C.toml").write_text("[train]\nsteps = 4\n")
    for name in ("corpus", "rows"):
        (folder / name).mkdir()
        line = '{"text": "%s"}\n' % ("some words, " * 40)
        (folder / name / "a.jsonl").write_text(99 * line)
    subprocess.run(["gzip", "--keep", "a.jsonl"], cwd=folder / "corpus", check=True)
    run("python -m dist_amp.tokenize --data.path rows --data.tokenizer bytes --out other", folder)
    pictures(folder / "pets")
    run(small("python -m dist_amp.train") + " --checkpoint.every 1 --run.dir made", folder)
    for name in RUNS:
        shutil.copytree(folder / "made", folder / name)
    return folder


def code_with(text, page):
    """The Python block of the page that has this text."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(block for block in blocks if text in block)


def pictures(folder):
    """Forty pictures of each of two classes."""
    from PIL import Image

    for pet in ("cat", "dog"):
        (folder / pet).mkdir(parents=True)
        for number in range(40):
            picture = Image.new("RGB", (80, 70), (number, 5 * number, 99))
            picture.save(folder / pet / f"{number}.png")


def add_hugging_face(folder):
    """A model, a tokenizer and their data."""
    import tiny_hf

    tiny_hf.make_model(folder / "model")
    for name in ("model", "my_tokenizer"):
        tiny_hf.make_tokenizer(folder / name)
    tiny_hf.write_rows(folder / "chats.jsonl", tiny_hf.chats())
    pair = {"prompt": "1, 2,", "chosen": " 3", "rejected": " 4"}
    tiny_hf.write_rows(folder / "pairs.jsonl", 40 * [pair])


def run(command, folder):
    """Run a command line in a folder; those of this package in a fork (see forked.py)."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    environ |= {"DIST_AMP_PYTHON": sys.executable}
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    if match := OF_THIS_PACKAGE.match(command):
        ours = "benchmarks" if match[1] == "benchmarks" else "dist_amp.commands"
        done = finish(Forked(shlex.split(match[2]), folder, environ, f"{ours}.__main__"), 600)
    else:
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def blocks_to_run():
    """Blocks of which a command is run, as parameters; the long ones are slow tests."""
    found = []
    for block in BLOCKS:
        if not all(map(needs, block.commands)):
            marks = [] if commands_in_docs.is_quick(block) else [pytest.mark.slow]
            name = f"{block.page}: {block.commands[0]}"
            found.append(pytest.param(block, marks=marks, id=name))
    return found


@pytest.mark.parametrize("block", blocks_to_run())
def test_the_commands_of_a_block_run_from_top_to_bottom(block, clone, tmp_path):
    folder = tmp_path / "clone"
    shutil.copytree(clone, folder, symlinks=True)
    if HUGGING_FACE.search(" ".join(block.commands)):
        add_hugging_face(folder)
    for command in block.commands:
        if not needs(command):
            run(small(command), folder)
