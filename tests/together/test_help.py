"""What the commands say of themselves: --help of each, in a pipe; --version."""

import importlib
import json
import re
import signal
import subprocess
import sys

import pytest
from forked import ROOT

import dist_amp
from benchmarks.__main__ import BENCHES
from benchmarks.__main__ import main as bench
from dist_amp.commands import __main__ as commands
from dist_amp.train import main as train

SINUSOID = ["--task.target", f"{ROOT}/examples/sinusoid.py:Sinusoid"]


def test_every_commands_and_benchs_help_works(capsys):
    modules = [f"dist_amp.{name}{'.__main__' * (name == 'verify')}" for name in commands.COMMANDS]
    helps = {name: importlib.import_module(name).main for name in modules}
    helps |= {name: lambda argv, name=name: bench([name, *argv]) for name in BENCHES}
    for name, main in helps.items():
        assert main(["--help"]) == 0, name
        out, err = capsys.readouterr()
        assert len(out.strip()) > 60, name
        assert err == "", name


@pytest.mark.bad_input("`--help` with a section that is not there")
@pytest.mark.parametrize(
    ("word", "first", "only"),
    [
        ("optim", "--optim.", "--optim."),
        ("precision.scaler", "--precision.scaler.", "--precision.scaler."),
        ("task.args", "--task.args.", "--task.args."),
        ("lr", "--optim.lr FLOAT", ""),  # settings whose name has the word
        ("hidden", "--task.args.hidden", ""),
    ],
)
def test_help_of_a_section_or_word_shows_its_settings_alone_also_of_the_task_that_is_given(
    word, first, only, capsys
):
    assert train([*SINUSOID, "--help", word]) == 0
    out = capsys.readouterr().out
    settings = re.split(r"(?m)^  (?=--[a-z])", out)[1:]
    assert settings[0].startswith(first)
    assert all(setting.startswith(only) for setting in settings)
    assert all(only or re.search(rf"(?i){word}", setting) for setting in settings)
    assert ("--task.args.hidden" in out) == (word in ("hidden", "task.args"))
    if only:
        assert train(["--help", f"{word}n"]) == 64
        said = f"error: --help {word}n: no section or setting has this name; the sections are run"
        assert said in capsys.readouterr().err


def test_what_is_installed_is_listed_and_started(monkeypatch, capsys):
    monkeypatch.setattr(commands, "COMMANDS", {**commands.COMMANDS, "nothing": "is not there"})
    for words in ("--help", "--version", "nothing"):
        monkeypatch.setattr(sys, "argv", ["dist_amp", *words.split()])
        assert commands.main() == (64 if words == "nothing" else 0)
    out, err = capsys.readouterr()
    assert f"\ndist_amp {dist_amp.__version__}, torch " in out
    assert "nothing" not in out
    assert "there is no command nothing" in err


# Answers without torch; then the commands with a torch that is interrupted as it is imported.
ANSWERS = """
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dist_amp.commands.__main__ import main

answers = {}
commands, interrupted, folder = json.load(sys.stdin)
for words in commands:
    sys.argv = ["dist_amp", *words.split()]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    answers[words] = status, out.getvalue(), err.getvalue(), "torch" in sys.modules
for words in interrupted:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 2)
        sys.path.insert(0, folder)
        sys.argv = ["dist_amp", *words.split()]
        os._exit(main())
    os.close(write)
    err = open(read).read()
    answers[words] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "", err, False
print(json.dumps(answers))
"""
INTERRUPTED = ("train --train.steps 2", "launch --train.steps 2", "doctor")
HELP = "train --help lr"
MISTAKES = {
    "trian": "there is no command trian; did you mean train?",
    "train --learning_rate 3": "unknown key learning_rate on the command line; did you mean ",
    "train --task.args.x 1 --train.steps five": "train.steps=five on the command line must",
    "launch --nproc-per-node 2 --standalone --train.stepz 4": "unknown key train.stepz on",
    "launch --optim.lr x --nnodes 2 -m mine": "optim.lr=x on the command line must be a valid",
    "launch --nnodes 2 --config nowhere.toml": "--config nowhere.toml: No such file or direct",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """{words: exit status, output, errors, whether torch is imported}, of one new process."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    given = json.dumps([[HELP, *MISTAKES], [*INTERRUPTED], str(folder)])
    command = [sys.executable, "-c", ANSWERS]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.bad_input("a wrong setting of any command: said before torch is imported")
def test_help_and_every_mistake_that_needs_no_task_are_answered_without_torch(answers):
    status, out, _, has_torch = answers[HELP]
    assert (status, has_torch) == (0, False)
    assert out.startswith("  --optim.lr FLOAT")
    for words, said in MISTAKES.items():
        status, _, err, has_torch = answers[words]
        assert (status, has_torch) == (64, False), err
        assert err.startswith(f"error: {said}")
        assert err.count("\n") == 1


@pytest.mark.bad_input("Ctrl-C during the imports")
def test_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(answers):
    for words in INTERRUPTED:
        status, _, err, _ = answers[words]
        assert (status, err) == (-signal.SIGINT, "")


def test_what_only_the_task_or_the_command_can_know_is_left_to_them():
    words = "--widht 3 --task.args.no such --run.dir runs/a"
    commands.check_early(words.split(), has_options=False)
    words = "RUN --json --run.dir a --nproc-per-node 4 --device_memory_GiB=3.5 -m mine --a.b c"
    commands.check_early(words.split(), has_options=True)
    commands.check_early(["--optim.nope", "--help"], has_options=False)
