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

from dist_amp.commands import new
from dist_amp.commands.parts import Parts

CHOICES = {
    "bare": ["--without", "demo,launch,console"],
    "my_project": ["--with", "ema,slurm", "--yes"],
    "everything_there_is": ["--with", "all"],
}
PARTS = Parts(ROOT / "dist_amp", ROOT / "launch")
RUFF = Path(sys.executable).with_name("ruff")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{name: the project with its choice of features}."""
    folder = tmp_path_factory.mktemp("made")
    for name, words in CHOICES.items():
        assert new.main([f"{folder}/{name}", *words]) == 0
    return {name: folder / name for name in CHOICES}


@pytest.fixture(params=CHOICES)
def root(made, request):
    return made[request.param]


def call(root, *words):
    done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


def files_of(root, *folders):
    paths = [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
    return {path.relative_to(root).as_posix() for path in paths}


# ---- what is made ----


def test_the_package_is_this_one_byte_for_byte_without_the_features_left_out(root):
    files = files_of(root, "dist_amp", "launch")
    features = pyproject(root)["tool"]["dist_amp"]["features"]
    assert files == PARTS.files_with(features)
    for file in files - {"launch/constraints.txt"}:
        assert (root / file).read_bytes() == (ROOT / file).read_bytes(), file
    for name in features:
        test = f"tests/features/test_{name}.py"
        assert (root / test).exists() == (ROOT / test).exists()


def test_one_commit_on_two_branches_has_all_of_it_and_passes_lint(root):
    assert call(root, "git", "status", "--porcelain", "--ignored") == ""
    assert call(root, "git", "branch", "--format=%(refname:short)") == "dist_amp\nmain\n"
    assert call(root, "git", "rev-list", "--count", "--all").strip() == "1"
    call(root, RUFF, "check", "--no-cache", ".")
    call(root, RUFF, "format", "--no-cache", "--check", ".")


@pytest.mark.slow
def test_types_pass(root, tmp_path):
    call(root, sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path))


def test_readme_configs_and_scripts_name_only_what_is_there(root):
    paths = [root / "README.md", *(root / "configs").glob("*.toml"), *(root / "launch").iterdir()]
    text = "\n".join(path.read_text() for path in paths if path.name != "demo.sh")
    for file in PARTS.files.keys() - files_of(root, "dist_amp") - {"dist_amp/commands/new.py"}:
        module = file.removesuffix(".py").replace("/", ".")
        assert module.replace("dist_amp.commands.", "dist_amp.") not in text
        if "/commands/" in file:
            assert f"dist_amp {Path(file).stem} " not in text
    for word in text.replace("(", " ").replace(")", " ").replace("`", " ").split():
        name = word.strip(".,:;'\"|")
        if name.startswith(("launch/", "configs/", "dist_amp/")) and "=" not in name:
            assert (root / name).exists(), name


@pytest.mark.parametrize(("name", "has"), [("bare", False), ("everything_there_is", True)])
def test_dependencies_and_pins_are_those_of_what_was_chosen(name, has, made):
    content = pyproject(made[name])["project"]
    names = {new.distribution(line) for line in content["dependencies"]}
    assert {"torch", "tensorboard", "pydantic"} <= names
    assert ("safetensors" in names) == has
    extras = content["optional-dependencies"]
    assert {"bench", "docs", "engines"}.isdisjoint(extras)
    assert ("hf" in extras, list(extras) == ["test"]) == (has, not has)
    assert ("transformers>=5.23" in extras["test"]) == has
    pins = (made[name] / "launch/constraints.txt").read_text()
    assert "\ntorch==" in pins
    assert "\nsympy==" in pins, "which torch needs"
    assert ("\ntransformers==" in pins) == has
    assert "matplotlib" in new.needed_by(["dist_amp[plot]"]) - new.needed_by(["dist_amp"])


def test_help_lists_each_feature_with_the_first_sentence_of_its_docstring(capsys):
    new.main(["--help"])
    said = capsys.readouterr().out
    assert "ema                       An exponential moving average of the trained" in said
    assert "slurm                     Train under Slurm: one torchrun per node" in said


TASK = """import einops
import torch
from torch import nn


class Curve:
    def build_model(self):
        return nn.Linear(4, 1)

    def on_step(self, run, report):
        pass
"""


def test_on_a_terminal_it_asks_and_a_task_of_the_users_brings_what_it_needs(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "curve.py").write_text(TASK)
    root = tmp_path / "mine"
    answers = iter([str(root), "ema, slurm", f"{tmp_path}/curve.py:Curve"])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert new.main([]) == 0
    assert "with machine, rendezvous, many_nodes, needed" in capsys.readouterr().out
    assert (root / "mine/task.py").read_text() == TASK
    assert 'target = "mine.task:Curve"' in (root / "configs/demo.toml").read_text()
    record = pyproject(root)["tool"]["dist_amp"]
    assert {"ema", "many_nodes", "callbacks"} <= set(record["features"]), "who reads on_step?"
    assert pyproject(root)["project"]["dependencies"][-1] == "einops"


# ---- what is refused ----

TASK_RULE = "must be FILE.py:Class, a class in a file that exists"
BAD = [
    (["my-project"], "a package's name has letters, digits and _, and is no word of Python"),
    (["class"], "use one such as my_class"),
    (["torch"], "torch is the name of a module"),
    (["dist_amp"], "dist_amp is the name of a module"),
    (["tiny"], "or of something in each project; use another, such as my_tiny"),
    (["taken"], "new taken: this exists; use another name"),
    (["no/where"], "No such file or directory"),
    (["x", "--with", "emma"], "there is no feature emma; did you mean ema?"),
    (
        ["x", "--with", "slurm", "--without", "launch"],
        "launch is needed by slurm; leave that out, too",
    ),
    (["x", "--task", "no.py:T"], f"--task no.py:T {TASK_RULE}"),
    (["x", "--task", "mine.py:T"], f"--task mine.py:T {TASK_RULE}"),
    ([], "new: give the project a name"),
]


@pytest.mark.bad_input("`dist_amp new`: a name or folder that is taken or can't be a package's")
@pytest.mark.bad_input("`dist_amp new`: a feature that does not exist, or needs another")
@pytest.mark.bad_input("`dist_amp new`: a task that can't be copied")
@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_can_not_be_made_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert new.main(words) == (1 if words == ["no/where"] else 64)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.bad_input("`dist_amp new`: no git, interrupted, or a full disk")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt, "nothing was made"),
        (OSError("No space left on device"), "No space left on device; nothing was made"),
        (None, "git is missing"),
    ],
)
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, capsys, error, said):
    def fail(*words):
        raise error

    if error is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(new, "git", fail)
        monkeypatch.setattr(new, "source_of", lambda root: ("", ""))
    assert new.main([f"{tmp_path}/mine"]) != 0
    assert said in capsys.readouterr().err
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
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["strategy"]) == (4, strategy)
    assert (summary["resumed_from_step"], summary["world_size"]) == (2, 2)
    assert summary["stopped_by"] == "completed"
    assert (run / "checkpoints/step_00000004").is_dir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    for rank in ("rank00000", "rank00001"):
        assert list((run / "tensorboard" / rank).glob("events.*"))


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
