"""What the commands say of themselves: --help of each, in a pipe; --version, completion."""

import importlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from forked import ROOT

import dist_amp
from benchmarks.__main__ import BENCHES
from benchmarks.__main__ import main as bench
from dist_amp.commands import __main__ as commands
from dist_amp.train import main as train


def modules_with_a_main():
    """The package's modules that `python -m` starts, by what their text says."""
    for found in pkgutil.walk_packages(dist_amp.__path__, "dist_amp."):
        path = found.module_finder.find_spec(found.name).origin
        text = Path(path).read_text()
        if "\ndef main(argv" in text and '__name__ == "__main__"' in text:
            yield found.name


MODULES = sorted(modules_with_a_main())
assert {"dist_amp.train", "dist_amp.commands.export"} <= set(MODULES)


@pytest.mark.parametrize("name", [*MODULES, "dist_amp.verify.__main__"])
def test_every_modules_help_works(name, capsys):
    module = importlib.import_module(name)
    assert module.main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert len(out.strip()) > 60
    assert err == ""


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchs_help_works_by_its_name(name, capsys):
    assert bench([name, "--help"]) == 0
    assert len(capsys.readouterr().out.strip()) > 60


@pytest.mark.bad_input("a bench without options that is given some")
def test_a_bench_without_options_refuses_them(capsys):
    assert bench(["log_step", "--sizes", "2"]) == 64
    said = "error: unrecognized arguments: --sizes 2; see python -m benchmarks log_step"
    assert capsys.readouterr().err.startswith(said)


def test_trains_help_begins_with_three_examples_and_the_options_that_are_no_keys(capsys):
    assert train(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("examples:")
    assert at < 4
    assert [line.split()[0] for line in lines[at + 1 : at + 5] if line] == ["dist_amp"] * 3
    options = [line.split()[0] for line in lines if line.startswith("  -")]
    assert options[:5] == ["-h,", "--config", "--print_config", "--use_amp", "--run.dir"]


@pytest.mark.parametrize("section", ["optim", "precision.scaler", "task.args"])
def test_help_of_a_section_shows_its_keys_alone_also_of_the_task_that_is_given(section, capsys):
    task = ["--task.target", f"{ROOT}/examples/sinusoid.py:Sinusoid"]
    assert train([*task, "--help", section]) == 0
    out = capsys.readouterr().out
    options = [line.split()[0] for line in out.splitlines() if re.match("  --[a-z]", line)]
    assert options
    assert all(option.startswith(f"--{section}.") for option in options)
    assert ("--task.args.hidden" in out) == (section == "task.args")


@pytest.mark.bad_input("`--help` with a section that is not there")
def test_a_section_that_is_not_there_is_named_with_the_nearest(capsys):
    assert train(["--help", "optin"]) == 64
    said = "error: --help optin: no section or setting has this word; did you mean optim?\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("word", "first", "also"),
    [
        ("lr", "--optim.lr FLOAT", "--optim.warmup_steps"),
        ("warmup", "--optim.warmup_steps INT", None),
        ("clip", "--train.clip_by", None),
        ("hidden", "--task.args.hidden", None),
        ("evict", "--run.eviction_notice", None),  # a part of a word, as no setting has it whole
    ],
)
def test_help_of_a_word_shows_the_settings_whose_name_or_meaning_has_it(word, first, also, capsys):
    task = ["--task.target", f"{ROOT}/examples/sinusoid.py:Sinusoid"]
    assert train([*task, "--help", word]) == 0
    out = capsys.readouterr().out
    assert out.strip().startswith(first)
    assert (also or "") in out
    settings = re.split(r"(?m)^  (?=--)", out)[1:]
    assert all(re.search(rf"(?i){word}", setting) for setting in settings)
    assert "--checkpoint.keep" not in out


@pytest.mark.parametrize("section", [[], ["optim"]])
def test_a_settings_meaning_is_wrapped_once_at_the_width_of_the_terminal(
    section, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "70")
    assert train(["--help", *section]) == 0
    meanings = re.findall(r"(?m)(?:^ {8,}\S.*\n)+", capsys.readouterr().out)
    assert len(meanings) > 4
    for line, after in (pair for meaning in meanings for pair in pairwise(meaning.splitlines())):
        assert len(line) <= 70 < len(line) + 1 + len(after.split()[0])


@pytest.mark.slow  # tests/features/test_verify.py has train's main in this process
def test_help_in_a_pipe_that_is_closed_early_prints_no_traceback():
    head = f"{sys.executable} -m dist_amp.train --help | head -1"
    done = subprocess.run(["/bin/bash", "-c", head], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


# ---- dist_amp COMMAND


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["dist_amp", *words])
    return commands.main()


def test_the_version_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith(f"dist_amp {dist_amp.__version__}, torch ")


def test_a_command_whose_module_is_missing_is_neither_listed_nor_started(monkeypatch, capsys):
    monkeypatch.setattr(commands, "COMMANDS", {**commands.COMMANDS, "nothing": "is not there"})
    assert run(monkeypatch, "--help") == 0
    assert "nothing" not in capsys.readouterr().out
    assert run(monkeypatch, "nothing") == 64
    assert "there is no command nothing" in capsys.readouterr().err


WITHOUT_TORCH = """
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from dist_amp.commands.__main__ import main

answers = {}
for words in json.load(sys.stdin):
    sys.argv = ["dist_amp", *words.split()]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main()
    answers[words] = status, out.getvalue(), err.getvalue(), "torch" in sys.modules
print(json.dumps(answers))
"""


MISTAKES = {
    "trian": "there is no command trian; did you mean train?",
    "train --learning_rate 3": "unknown key learning_rate on the command line; did you mean ",
    "train --task.args.x 1 --train.steps five": "train.steps=five on the command line must",
    "launch --nproc-per-node 2 --standalone --train.stepz 4": "unknown key train.stepz on",
    "launch --optim.lr x --nnodes 2 -m mine": "optim.lr=x on the command line must be a number",
    "launch --nnodes 2 --config nowhere.toml": "--config nowhere.toml: No such file or direct",
    "plan --world_size 8 --eval.every of": "eval.every=of on the command line must be a whol",
    "plan --worldsize 8": "unknown option --worldsize; did you mean --world_size?",
    "export RUN --outt=x": "unknown option --outt; did you mean --out?",
}


@pytest.fixture(scope="module")
def answers():
    """{words: exit status, output, errors, whether torch is imported}, of one new process."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps(["", *MISTAKES]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_command_is_answered_without_torch(answers):
    status, out, _, has_torch = answers[""]
    assert (status, has_torch) == (0, False)
    assert out.startswith("usage: dist_amp COMMAND")


@pytest.mark.bad_input("a wrong setting of any command: said before torch is imported")
@pytest.mark.parametrize("words", MISTAKES)
def test_every_mistake_that_needs_no_task_is_answered_without_torch(words, answers):
    status, _, err, has_torch = answers[words]
    assert (status, has_torch) == (64, False), err
    assert err.startswith(f"error: {MISTAKES[words]}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", commands.OPTIONS)
def test_the_options_that_are_checked_early_are_those_of_the_command(name, capsys):
    module = importlib.import_module(f"dist_amp.{name}")
    if name == "verify":
        module = importlib.import_module("dist_amp.verify.__main__")
    assert module.main(["--help"]) == 0
    options = set(re.findall(r"^  (?:-h, )?(--\w+)", capsys.readouterr().out, re.MULTILINE))
    assert options == {"--help", *commands.OPTIONS[name].split()}


def test_what_only_the_task_or_the_command_can_know_is_left_to_them():
    words = "--widht 3 --task.args.no such --run.dir runs/a"
    commands.check_early(words.split(), has_options=False)
    words = "RUN --json --run.dir a --nproc-per-node 4 --device_memory_GiB=3.5 -m mine --a.b c"
    commands.check_early(words.split(), has_options=True)
    commands.check_early(["--optim.nope", "--help"], has_options=False)


@pytest.mark.bad_input("Ctrl-C during the imports")
@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("train", " before any rank had started"),
        ("launch", " before any rank had started"),
        ("doctor", "; nothing was made or changed"),
    ],
)
def test_ctrl_c_during_the_imports_is_one_line(command, end, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", "dist_amp", command, "--train.steps", "2"]
    done = subprocess.run(words, capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == f"error: stopped by SIGINT{end}"
    if command == "launch":
        assert lines[0].startswith("launch checks the settings, then starts the ranks")
    assert len(lines) == 1 + (command == "launch")


@pytest.mark.bad_input("`dist_amp --completion` with another shell")
def test_a_shell_that_can_not_be_completed_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "--completion", "cmd") == 64
    assert capsys.readouterr().err == "error: --completion cmd: give one of bash, zsh, fish\n"


COMPLETE = """
source "$1"
complete_with=$(complete -p dist_amp | sed 's/.*-F \\([^ ]*\\).*/\\1/')
try() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "$complete_with" dist_amp "${COMP_WORDS[COMP_CWORD]}" ""
    echo "${COMPREPLY[*]}"
}
try dist_amp tr
try dist_amp train --optim.wa
try dist_amp launch --optim.wa
try dist_amp train --run.device ""
try dist_amp train --run.d
try dist_amp train --config comp
try dist_amp train --run.dir comp
"""


@pytest.mark.slow  # bash starts, and the default task is imported
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not there")
def test_bash_completes_commands_settings_and_paths_and_offers_no_help_as_a_value(
    monkeypatch, capsys, tmp_path
):
    assert run(monkeypatch, "--completion", "bash") == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    command = ["bash", "-c", COMPLETE, "-", tmp_path / "completion"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    of_run = "--run.dir --run.deterministic --run.device"
    expected = ["train", "--optim.warmup_steps", "--optim.warmup_steps", "auto cpu cuda"]
    expected += [of_run, "completion", "completion"]
    assert done.stdout.splitlines() == expected, done.stderr
