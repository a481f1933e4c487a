"""dist_amp new: a project of whole files, that stands by itself with any choice of features."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from forked import Launch
from messages import message_of

from dist_amp.commands import new
from dist_amp.commands.parts import Parts
from dist_amp.config.task_class import find_task

CHOICES = {
    "bare": ["--without", "demo,launch,console"],
    "my_project": ["--with", "ema,slurm", "--yes"],
    "everything_there_is": ["--with", "all"],
}
PARTS = Parts(ROOT / "dist_amp", ROOT)
RUFF = Path(sys.executable).with_name("ruff")


@pytest.fixture(autouse=True, scope="module")
def parts_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new, "Parts", lambda *folders: PARTS)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory, parts_are_read_once):
    """{name: the project with its choice of features}."""
    folder = tmp_path_factory.mktemp("made")
    for name, words in CHOICES.items():
        assert new.main([f"{folder}/{name}", *words]) == 0
    return {name: folder / name for name in CHOICES}


@pytest.fixture(params=CHOICES)
def root(made, request):
    return made[request.param]


def call(root, *words, **options):
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=root, **options)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-6000:]}"
    return done.stdout


def pyproject(root):
    return tomllib.loads((root / "pyproject.toml").read_text())


# ---- what is made ----


def test_files_are_those_of_the_choice_byte_for_byte_in_one_commit_that_passes_lint(root):
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*.*") if path.is_file()]
    files = {path for path in paths if path.startswith(("dist_amp/", "launch/", "tests/"))}
    features = pyproject(root)["tool"]["dist_amp"]["features"]
    assert files == PARTS.files_with(features) | {"tests/test_own_task.py"}
    for file in files - {"launch/constraints.txt", "tests/test_own_task.py"}:
        assert (root / file).read_bytes() == (ROOT / file).read_bytes(), file
    for name in features:
        test = f"tests/features/test_{name}.py"
        assert (test in files) == (ROOT / test).exists()
    assert call(root, "git", "status", "--porcelain", "--ignored") == ""
    assert call(root, "git", "branch", "--format=%(refname:short)") == "dist_amp\nmain\n"
    assert call(root, "git", "rev-list", "--count", "--all") == "1\n"
    call(root, RUFF, "check", "--no-cache", ".")
    call(root, RUFF, "format", "--no-cache", "--check", ".")


@pytest.mark.slow
def test_types_pass(root, tmp_path):
    call(root, sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path))


def test_readme_configs_and_scripts_name_only_what_is_there(root):
    paths = [root / "README.md", *(root / "configs").glob("*.toml"), *(root / "launch").iterdir()]
    text = "\n".join(path.read_text() for path in paths if path.name != "demo.sh")
    absent = {file for file in PARTS.files if not (root / file).exists()}
    assert PARTS.named_in(text) & absent <= {"dist_amp/commands/new.py"}
    for file in absent - {"dist_amp/commands/new.py"}:
        assert "/commands/" not in file or f"dist_amp {Path(file).stem} " not in text
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
    assert {"bench", "docs", "engines", "clone"}.isdisjoint(extras)
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
    assert "slurm                     Train under Slurm, with one torchrun per node" in said


TASK = """import einops
import torch
from torch import nn


class Curve:
    def build_model(self):
        return nn.Linear(4, 1)

    def on_step(self, run, report):
        pass
"""


def test_on_a_terminal_it_asks_and_a_task_of_the_users_brings_what_it_needs(tmp_path, monkeypatch):
    (tmp_path / "curve.py").write_text(TASK)
    root = tmp_path / "mine"
    answers = iter([str(root), "ema, slurm", f"{tmp_path}/curve.py:Curve"])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert new.main([]) == 0
    assert (root / "mine/task.py").read_text() == TASK
    assert 'target = "mine.task:Curve"' in (root / "configs/demo.toml").read_text()
    features = pyproject(root)["tool"]["dist_amp"]["features"]
    assert {"ema", "many_nodes", "callbacks"} <= set(features), "who reads on_step?"
    assert pyproject(root)["project"]["dependencies"][-1] == "einops"


def test_a_task_that_a_project_lacks_is_named_with_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dist_amp.tasks", None)  # as without the folder
    text = message_of(64, find_task, "dist_amp.tasks.absent:Task")
    assert text.endswith("no dist_amp/tasks/absent.py; get it with `dist_amp adopt absent`")


# ---- what is refused ----

BAD = [
    (["my-project"], "a package's name has letters, digits and _, and is not a keyword of Python"),
    (["torch"], "torch is the name of a module"),
    (["dist_amp"], "dist_amp is the name of a module"),
    (["tiny"], "or of something in each project; use another name, such as my_tiny"),
    (["taken"], "new taken: it exists already; use another name"),
    (["x", "--with", "emma"], "there is no feature emma; did you mean ema?"),
    (["x", "--with", "slurm", "--without", "launch"], "launch is needed by many_nodes, slurm; "),
    (
        ["x", "--task", "no.py:T"],
        "--task no.py:T must be FILE.py:Class, an existing file that defin",
    ),
    (["x", "--task", "mine.py:T"], "--task mine.py:T must be FILE.py:Class, an existing file"),
    (["x", "--task", "broken.py:T"], "new x: invalid syntax (broken.py, line 3)"),
    ([], "new: give the project a name"),
]


@pytest.mark.bad_input("`dist_amp new`: a name or folder that is taken or can't be a package's")
@pytest.mark.bad_input("`dist_amp new`: a feature that does not exist; a task that can't be copied")
@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_what_can_not_be_made_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "taken").mkdir()
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken.py").write_text("class T:\n    pass\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert new.main(words) == 64
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

# For ranks that are forked with torch and the clone's package: they find the project's.
TRAIN = """
import os
import sys

for name in [name for name in sys.modules if name.split(".")[0] == "dist_amp"]:
    del sys.modules[name]

from dist_amp import train

assert train.__file__ == os.path.abspath("dist_amp/train.py")
sys.exit(train.main(sys.argv[1:]))
"""


def test_without_any_feature_two_ranks_train_save_resume_and_report(made, tmp_path):
    root = shutil.copytree(made["bare"], tmp_path / "bare")
    (root / "train.py").write_text(TRAIN)
    words = "--config demo --run.dir runs/a --run.device cpu --precision.dtype bf16"
    words += " --optim.warmup_steps 0 --train.micro_batch_size 2 --train.accumulation_steps 2"
    words += " --eval.batches 1 --checkpoint.every 2 --metrics.log_every 1"
    words += " --run.allow_config_change true --task.args.width 16 --task.args.context 16"
    for strategy, steps in (("ddp", 2), ("fsdp", 4)):
        settings = ("--parallel.strategy", strategy, "--train.steps", steps, *words.split())
        for done in Launch(root).each(2, *settings, module="train.py", PYTHONPATH=str(root)):
            assert done.returncode == 0, done.stderr
    run = root / "runs/a"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["strategy"]) == (4, "fsdp")
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
    environ = {name: value for name, value in os.environ.items() if name[:5] != "TORCH"}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "DIST_AMP_PYTHON": sys.executable}
    demo = "launch/demo.sh --run.device cpu --train.steps 20 --run.dir runs/a"
    test = "launch/test.sh tests/test_own_task.py"
    for words, expected in ((demo, "all of it is in runs/a"), (test, "1 passed")):
        assert expected in call(root, "bash", *words.split(), env=environ)
    assert call(root, "git", "status", "--porcelain") == ""
