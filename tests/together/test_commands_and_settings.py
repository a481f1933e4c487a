"""The commands as a user calls them: help, settings, mistakes, and a doctor of two ranks."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from reference import reference
from test_config import load, values
from test_schema import problems

import dist_amp
from benchmarks.__main__ import BENCHES
from benchmarks.__main__ import main as bench
from dist_amp.commands import __main__ as commands
from dist_amp.commands import demo, trackers
from dist_amp.config.schema import json_schema
from dist_amp.errors import ConfigError
from dist_amp.train import main as train
from examples.sinusoid import Sinusoid

CONFIGS = ROOT / "configs"
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


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("optim", "--optim\\."),
        ("precision.scaler", "--precision\\.scaler\\."),
        ("task.args", "--task\\.args\\."),
        ("lr", ".*lr"),  # settings whose name or description has the word
        ("hidden", ".*hidden"),
    ],
)
def test_help_of_a_section_or_word_shows_its_settings_alone_also_of_the_task_that_is_given(
    word, setting, capsys
):
    assert train([*SINUSOID, "--help", word]) == 0
    out = capsys.readouterr().out
    settings = re.split(r"(?m)^  (?=--[a-z])", out)[1:]
    assert [text for text in settings if not re.match(f"(?is){setting}", text)] == []
    assert ("--optim.lr FLOAT" in out) == (word in ("optim", "lr"))
    assert ("--task.args.hidden" in out) == (word in ("hidden", "task.args"))


@pytest.mark.bad_input("`--help` with a section that is not there")
def test_help_of_a_section_that_is_not_there_lists_the_sections(capsys):
    assert train(["--help", "optimn"]) == 64
    said = "error: --help optimn: no section or setting has this name; the sections are run"
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


# Each command in a fork, whose import of torch would interrupt it.
IN_FORKS = """
import json
import os
import sys
from dist_amp.commands.__main__ import main

commands, folder = json.load(sys.stdin)
sys.path.insert(0, folder)
answers = {}
for words in commands:
    read, write = os.pipe()
    if not (child := os.fork()):
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.argv = ["dist_amp", *words.split()]
        sys.exit(main())
    os.close(write)
    output = open(read).read()
    answers[words] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output
print(json.dumps(answers))
"""
MISTAKES = {
    "trian": "there is no command trian; did you mean train?",
    "train --learning_rate 3": "unknown key learning_rate on the command line; did you mean ",
    "train --task.args.x 1 --train.steps five": "train.steps=five on the command line must",
    "launch --nproc-per-node 2 --standalone --train.stepz 4": "unknown key train.stepz on",
    "launch --optim.lr x --nnodes 2 -m mine": "optim.lr=x on the command line must be a valid",
    "launch --nnodes 2 --config nowhere.toml": "--config nowhere.toml: No such file or direct",
}


@pytest.mark.bad_input("a wrong setting of any command: said before torch is imported")
@pytest.mark.bad_input("Ctrl-C during the imports")
def test_help_and_mistakes_are_answered_without_torch_and_ctrl_c_ends_its_import(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    interrupted = ("train --train.steps 2", "launch --train.steps 2", "doctor")
    commands = [["train --help lr", *MISTAKES, *interrupted], str(tmp_path)]
    process = [sys.executable, "-c", IN_FORKS]
    done = subprocess.run(process, input=json.dumps(commands), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    status, output = answers["train --help lr"]
    assert (status, output[:18]) == (0, "  --optim.lr FLOAT")
    for words, said in MISTAKES.items():
        status, output = answers[words]
        assert status == 64, output
        assert output.startswith(f"error: {said}")
        assert output.count("\n") == 1
    for words in interrupted:
        assert answers[words] == [-signal.SIGINT, ""], "no traceback"


def test_what_only_the_task_or_the_command_can_know_is_left_to_them():
    words = "--widht 3 --task.args.no such --run.dir runs/a"
    commands.check_early(words.split(), has_options=False)
    words = "RUN --json --run.dir a --nproc-per-node 4 --device_memory_GiB=3.5 -m mine --a.b c"
    commands.check_early(words.split(), has_options=True)
    commands.check_early(["--optim.nope", "--help"], has_options=False)


def test_a_command_line_may_be_written_in_several_ways():
    assert load("--train.steps", "7", "--train.steps", "8").train.steps == 8, "the last one wins"
    assert load("--train.micro-batch-size", "3").train.micro_batch_size == 3
    assert not load("--use-amp=false").precision.use_amp
    assert load(*SINUSOID, "--task.args.frequencies", "-4", "2").task.args.frequencies == (-4, 2)


def test_every_shipped_config_loads_and_the_reference_has_every_setting_with_its_default():
    for path in CONFIGS.glob("*.toml"):
        load("--config", path)
    assert (CONFIGS / "reference.toml").read_text() == reference(), "run python tests/reference.py"
    assert values(load("--config", CONFIGS / "reference.toml")) == values(load())
    page = (ROOT / "docs/debugging.md").read_text()
    assert [key for key in values(load()) if key.startswith("debug.") and key not in page] == []


def test_the_arguments_of_a_task_are_checked_if_it_is_named():
    of_task = json_schema(Sinusoid)
    arguments = '[task]\ntarget = "examples/sinusoid.py:Sinusoid"\n[task.args]\n'
    assert problems(arguments + "hidden_layers = 8", of_task) == []
    (said,) = problems(arguments + "hidden_layer = 8", of_task)
    assert "hidden_layer" in said
    assert problems(arguments + "hidden_layer = 8") == [], "of an unknown task nothing is known"


@pytest.mark.bad_input("`follow` to a tracker that is not installed")
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it():
    with pytest.raises(ConfigError, match="not_there is not installed; pip install not_there"):
        trackers.imported("not_there")
    page = (ROOT / "docs/metrics.md").read_text()
    assert all(f".[{name}]" in page for name in trackers.TRACKERS)


def test_the_demo_is_a_launch_of_its_config(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append(argv))
    assert demo.main(["--train.steps", "5"]) == 0
    expected = ["-m", "dist_amp.launch", "--config", str(CONFIGS / "demo.toml")]
    assert started == [[sys.executable, *expected, "--train.steps", "5"]]


def test_a_doctor_of_two_ranks_is_printed_by_rank_0(launch):
    """With the variables that every launcher sets. One has been restarted: in an elastic run each
    machine counts its own restarts, and the ranks must meet all the same.
    """
    doctor = {"module": "dist_amp.doctor", "TORCHELASTIC_RESTART_COUNT": "{rank}"}
    first, second = launch.each(2, timeout=120, **doctor)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    for text in ("all-reduce .* GB/s bus bandwidth with 4 MiB; ", "links in a machine", "matmul"):
        assert re.search(f"^(ok  |warn)  {text}", first.stdout, re.M), first.stdout
