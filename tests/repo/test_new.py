"""dist_amp new: a project of whole files, that stands by itself with any choice of features."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from dist_amp.commands import new, project
from dist_amp.commands.__main__ import check_early
from dist_amp.commands.parts import Package
from dist_amp.config.load import collect, target_in

CHOICES = {
    "bare": ["--without", "demo,launch,console"],
    "my_project": ["--with", "ema,slurm"],
    "everything_there_is": ["--with", "all"],
}
HERE = Package(ROOT / "dist_amp")


def make(folder, *words):
    """The exit status of dist_amp new in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return new.main(words)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: the project with its choice of features}."""
    folder = tmp_path_factory.mktemp("made")
    for name, words in CHOICES.items():
        assert make(folder, name, *words) == 0
    return {name: folder / name for name in CHOICES}


@pytest.fixture(params=CHOICES)
def root(made, request):
    return made[request.param]


def call(root, *words):
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def record_of(root):
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["dist_amp"]


def files_of(root, folder):
    return {path.relative_to(root) for path in (root / folder).rglob("*") if path.is_file()}


# ---- what is made ----


def test_the_package_is_this_one_byte_for_byte_without_the_features_left_out(root):
    features = record_of(root)["features"]
    files = files_of(root, "dist_amp")
    expected = {HERE.files[name].relative_to(ROOT) for name in HERE.files_with(features)}
    assert files == expected | {Path("dist_amp/py.typed")}
    for file in files | files_of(root, "launch") - {Path("launch/constraints.txt")}:
        assert (root / file).read_bytes() == (ROOT / file).read_bytes(), file


def test_there_is_one_commit_on_two_branches_and_nothing_is_left_out_of_it(root):
    assert call(root, "git", "status", "--porcelain", "--ignored") == ""
    assert call(root, "git", "branch", "--format=%(refname:short)") == "dist_amp\nmain\n"
    assert call(root, "git", "rev-list", "--count", "--all").strip() == "1"


def test_lint_and_format_pass(root):
    call(root, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    call(root, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


@pytest.mark.slow
def test_types_pass(root, tmp_path):
    call(root, sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path))


def test_readme_configs_and_scripts_name_only_what_is_there(root):
    paths = [root / "README.md", *(root / "configs").glob("*.toml"), *(root / "launch").iterdir()]
    text = "\n".join(path.read_text() for path in paths if path.name != "demo.sh")
    modules = Package(root / "dist_amp").files
    for module in HERE.files.keys() - modules.keys():
        if module not in ("__init__", "commands.new"):
            assert f"dist_amp.{module.removeprefix('commands.')}" not in text
        if module.startswith("commands.") and module != "commands.new":
            assert f"dist_amp {module.removeprefix('commands.')} " not in text
    for word in text.replace("(", " ").replace(")", " ").replace("`", " ").split():
        name = word.strip(".,:;'\"|")
        if name.startswith(("launch/", "configs/", "dist_amp/")) and "=" not in name:
            assert (root / name).exists(), name


def test_each_config_trains_a_task_that_is_there(root):
    for path in (root / "configs").glob("*.toml"):
        words = ["--config", str(path)]
        check_early(words, has_options=False)
        target = target_in(collect(words, {}))
        module = target.partition(":")[0].replace(".", "/")
        assert (root / f"{module}.py").exists(), path.name
    demo = tomllib.loads((root / "configs/demo.toml").read_text())
    assert demo["task"]["target"] == f"{root.name}.task:Example"


@pytest.mark.parametrize(("name", "has"), [("bare", False), ("everything_there_is", True)])
def test_dependencies_and_pins_are_those_of_what_was_chosen(name, has, made):
    content = tomllib.loads((made[name] / "pyproject.toml").read_text())["project"]
    names = {project.distribution(line) for line in content["dependencies"]}
    assert {"torch", "tensorboard", "pydantic"} <= names
    assert ("safetensors" in names) == has
    assert (list(content["optional-dependencies"]) == ["test"]) != has
    assert ("hf" in content["optional-dependencies"]) == has
    pins = (made[name] / "launch/constraints.txt").read_text()
    assert "\ntorch==" in pins
    assert ("\ntransformers==" in pins) == has


def test_a_feature_brings_what_it_needs_and_its_test(made, capsys, tmp_path):
    assert make(tmp_path, "mine", "--with", "slurm") == 0
    assert "with machine, rendezvous, many_nodes, needed" in capsys.readouterr().out
    assert (tmp_path / "mine/launch/many_nodes.sh").exists()
    for name in record_of(made["my_project"])["features"]:
        test = f"tests/features/test_{name}.py"
        assert (made["my_project"] / test).exists() == (ROOT / test).exists()


def test_all_but_one_leaves_out_what_needs_it(capsys):
    chosen = set(new.choose(HERE, new.DEFAULT, ["all"], ["sources"]))
    assert chosen & {"sources", "causal_lm", "hf_causal_lm", "tokenize"} == set()
    assert chosen >= {"console", "ema", "slurm"}
    assert "causal_lm" in capsys.readouterr().out


def test_help_lists_each_feature_with_the_first_sentence_of_its_docstring(capsys):
    new.main(["--help"])
    said = capsys.readouterr().out
    assert "ema                       An exponential moving average of the trained" in said
    assert "slurm                     Train under Slurm: one torchrun per node" in said


def test_on_a_terminal_it_asks_for_what_was_not_given(monkeypatch):
    answers = iter(["my_project", "ema, muon", ""])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    options = new.parse([], HERE)
    assert options.name == "my_project"
    assert new.named(options.wanted, HERE) == ["ema", "muon"]


TASK = '''"""A curve."""

import einops
import torch
from torch import nn


class Curve:
    def build_model(self):
        return nn.Linear(4, 1)

    def on_step(self, run, report):
        pass
'''


def test_a_task_of_the_users_is_copied_and_brings_what_it_needs(tmp_path):
    (tmp_path / "curve.py").write_text(TASK)
    assert make(tmp_path, "mine", "--task", "curve.py:Curve") == 0
    root = tmp_path / "mine"
    assert (root / "mine/task.py").read_text() == TASK
    assert 'target = "mine.task:Curve"' in (root / "configs/demo.toml").read_text()
    assert "callbacks" in record_of(root)["features"], "who would read on_step?"
    dependencies = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    assert dependencies[-1] == "einops"


# ---- what is refused ----

BAD = [
    (["my-project"], "can't be a package's name, which has letters, digits and _, and begins"),
    (["class"], "'class' can't be a package's name"),
    (["torch"], "torch is already a module"),
    (["dist_amp"], "dist_amp is a folder of each project"),
    (["tiny"], "tiny is a module of its tests"),
    (["taken"], "new taken: this exists, and is not an empty folder; use another"),
    (["no/where"], "there is no folder no; make it first"),
    (["x", "--with", "emma"], "there is no feature emma; did you mean ema?"),
    (["x", "--with", "slurm", "--without", "launch"], "slurm needs launch, which is to be left o"),
    (["x", "--task", "no.py:T"], "--task no.py:T must be FILE.py:Class, with a file that exists"),
    (["x", "--task", "mine.py:T"], "there is no class T in mine.py, which has Mine"),
    (["x", "--task", "mine.py:Mine"], "mine.py imports beside, which lies beside it"),
    ([], "new: give the project a name"),
]


@pytest.mark.bad_input("`dist_amp new`: a name or folder that is taken or can't be a package's")
@pytest.mark.bad_input("`dist_amp new`: a feature that does not exist, or needs another")
@pytest.mark.bad_input("`dist_amp new`: a task that can't be copied")
@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_can_not_be_made_is_refused_in_one_line(tmp_path, capsys, words, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "mine.py").write_text("import beside\n\n\nclass Mine:\n    pass\n")
    before = sorted(tmp_path.rglob("*"))
    assert make(tmp_path, *words) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.bad_input("`dist_amp new`: no git")
def test_without_git_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make(tmp_path, "mine") == 64
    assert "git is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bad_input("`dist_amp new`: interrupted, or a full disk")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, capsys, error):
    def fail(folder, *words):
        raise error

    monkeypatch.setattr(new, "git", fail)
    assert make(tmp_path, "mine") == 1
    assert "nothing was made" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- what it does ----

RUNS = """
import os
import sys

import torch

from dist_amp.train import main

child = os.fork()  # one start of the interpreter and torch for both ranks
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
ports = iter(sys.argv[1:])
for strategy in ("ddp", "fsdp"):
    for steps in ("2", "4"):
        os.environ["MASTER_PORT"] = next(ports)
        words = f"--config demo --run.dir runs/{strategy} --run.device cpu --precision.dtype bf16"
        words += f" --parallel.strategy {strategy} --train.steps {steps} --optim.warmup_steps 0"
        words += " --train.micro_batch_size 2 --train.accumulation_steps 2 --eval.batches 1"
        words += " --checkpoint.every 2 --metrics.log_every 1 --run.allow_config_change true"
        words += " --task.args.width 16 --task.args.context 16"
        status = main(words.split())
        assert not status, (strategy, steps, status)
if child:
    _, status = os.waitpid(child, 0)
    assert status == 0, f"rank 1 ended with {status}"
"""
# An editable install of this repository may offer its files as parts of the project's package.
ALONE = """
import sys

sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
"""


def environment(root, folder):
    (folder / "sitecustomize.py").write_text(ALONE)
    environ = {name: value for name, value in os.environ.items() if name[:5] != "TORCH"}
    return environ | {"PYTHONPATH": f"{root}:{folder}", "OMP_NUM_THREADS": "1"}


def test_without_any_feature_two_ranks_train_save_resume_and_report(made, tmp_path):
    root = shutil.copytree(made["bare"], tmp_path / "bare")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *ports],
        cwd=root,
        env=environment(root, tmp_path) | world,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    for strategy in ("ddp", "fsdp"):
        check_run(root / "runs" / strategy, strategy)


def check_run(run, strategy):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["strategy"]) == (4, strategy)
    assert (summary["resumed_from_step"], summary["world_size"]) == (2, 2)
    assert summary["stopped_by"] == "completed"
    assert (run / "checkpoints/step_00000004").is_dir()
    for rank in ("rank00000", "rank00001"):
        events = EventAccumulator(str(run / "tensorboard" / rank))
        events.Reload()
        tags = set(events.Tags()["scalars"])
        assert {"throughput/items_per_second", "memory/peak_bytes"} <= tags
        if rank == "rank00000":
            assert [each.step for each in events.Scalars("train/loss")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_demo_and_the_tests_run_with_any_choice(root, tmp_path):
    root = shutil.copytree(root, tmp_path / root.name)
    environ = environment(root, tmp_path) | {"DIST_AMP_PYTHON": sys.executable}
    demo = "launch/demo.sh --run.device cpu --train.steps 20 --run.dir runs/a"
    for words, expected in (
        (demo, "all of it is in runs/a"),
        ("launch/test.sh tests/test_own_task.py", "1 passed"),
    ):
        command = ["bash", *words.split()]
        done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout + done.stderr
    assert call(root, "git", "status", "--porcelain") == ""
