"""dist_amp new: a project with some of the features, under its own name, that stands by itself."""

import os
import random
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import built_wheel
import pytest
from chaos import children, is_there
from conftest import ROOT
from deletable import TASK
from test_train import wait_for

from dist_amp.commands import new, project
from dist_amp.commands.deletion import definitions_without_users, names_in
from dist_amp.commands.features import choose, named, of_projects, read_table, with_dependents

TABLE = read_table(ROOT)
FEATURES = [name for name, row in TABLE.items() if not row.get("clone")]
FILES = ["Dockerfile", "README.md", "configs", "launch", "my_project", "pyproject.toml", "tests"]
RANDOM_SETS = 50
TESTED_SETS = (1, 2, 7)  # whose own tests are run, as those of each feature alone


def make(folder, *words):
    """(exit status) of dist_amp new my_project in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return new.main(["my_project", *words])
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the smallest project, what was said)."""
    folder = tmp_path_factory.mktemp("default")
    with redirect_stdout(StringIO()) as said:
        assert make(folder) == 0
    return folder / "my_project", said.getvalue()


@pytest.fixture
def default(made):
    return made[0]


def texts_of(root):
    paths = [path for path in root.rglob("*") if path.is_file() and ".git/" not in str(path)]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def call(root, *words, **environment):
    """What a command in the project prints; the test fails with that if it fails."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"MY_PROJECT_PYTHON": sys.executable, **environment}
    done = subprocess.run(words, cwd=root, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def python(root, *words):
    return call(root, sys.executable, "-m", *words)


# ---- the smallest ----


def test_a_project_has_these_files_and_one_commit(default):
    assert sorted(path.name for path in default.iterdir() if path.name[0] != ".") == FILES
    assert call(default, "git", "status", "--porcelain") == ""
    assert call(default, "git", "rev-list", "--count", "main").strip() == "1"


def test_the_smallest_says_how_large_it_is_and_what_comes_next(made):
    root, said = made
    lines = [len(path.read_text().splitlines()) for path in (root / "my_project").rglob("*.py")]
    assert said == (
        f"my_project: {sum(lines):,} lines in {len(lines)} files, with console; next: "
        "cd my_project && bash launch/demo.sh\n"
    )


def test_our_name_is_left_only_where_a_project_says_what_it_was_made_from(default):
    named = {name for name, text in texts_of(default).items() if "dist_amp" in text.lower()}
    assert named == {"README.md", "pyproject.toml"}
    record = tomllib.loads((default / "pyproject.toml").read_text())["tool"]["dist_amp"]
    assert record["features"] == ["console"]
    assert record["version"] == "0.1.0"


def test_a_project_checks_the_types_of_its_own_package_alone(default):
    tools = tomllib.loads((default / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["files"] == ["my_project"], "the examples stay in the clone"


def test_no_name_is_undefined_unused_or_missing_and_each_file_is_formatted(default):
    python(default, "ruff", "check", "--no-cache", ".")
    python(default, "ruff", "format", "--no-cache", "--check", ".")
    modules = [path.relative_to(default).with_suffix("") for path in default.rglob("*/*.py")]
    names = [".".join(path.parts) for path in modules if path.parts[0] == "my_project"]
    call(default, sys.executable, "-c", f"import {', '.join(names)}".replace(".__init__", ""))


def test_a_project_declares_what_it_imports_and_no_more(default):
    lines = tomllib.loads((default / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {project.distribution(line) for line in lines}
    assert names == {"torch", "tensorboard", "tqdm", "tomli-w", "numpy", "xxhash"}


def test_the_main_job_trains_the_example_and_resumes(default):
    trains_and_resumes(default)


def trains_and_resumes(root):
    """By the project's own demo, in few steps; without a GPU on two processes."""
    words = ["--run.dir", "runs/mine", "--use_amp", "false", "--train.micro_batch_size", "2"]
    words += ["--eval.batches", "2", "--checkpoint.every", "2", "--metrics.log_every", "1"]
    words += ["--run.allow_config_change", "true", "--task.args.width", "16"]
    for steps in ("2", "4"):
        call(root, "bash", "launch/demo.sh", *words, "--train.steps", steps, OMP_NUM_THREADS="1")
    summary = tomllib.loads((root / "runs/mine/config.toml").read_text())
    assert summary["train"]["steps"] == 4
    text = (root / "runs/mine/summary.json").read_text()
    assert '"resumed_from_step": 2' in text
    assert '"stopped_by": "completed"' in text
    folders = sorted(path.name for path in (root / "runs/mine/tensorboard").iterdir())
    assert folders[:2] == ["rank00000", "rank00001"][: len(folders)]
    shutil.rmtree(root / "runs")


MLP = """
import torch
from torch import nn


class MLP:
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def build_dataset(self, split):
        return torch.randn(64, 5)

    def loss_sum(self, model, batch):
        return ((model(batch[:, :4]) - batch[:, 4:]) ** 2).sum()

    def weight(self, batch):
        return len(batch)
"""


def torchrun_of_an_mlp(root, folder, steps):
    """torchrun with two ranks under DDP, started in the project; its errors are in errors.txt."""
    (folder / "mlp.py").write_text(MLP)
    words = ["torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node=2"]
    words += ["-m", "my_project.train", "--task.target", f"{folder}/mlp.py:MLP"]
    words += ["--run.dir", str(folder / "run"), "--run.device", "cpu", "--use_amp", "false"]
    words += ["--parallel.strategy", "ddp", "--train.steps", str(steps), "--eval.every", "off"]
    words += ["--metrics.log_every", "1", "--train.micro_batch_size", "2"]
    environ = {name: value for name, value in os.environ.items() if name[:5] != "TORCH"}
    environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{environ['PATH']}"}
    with open(folder / "errors.txt", "w") as errors:
        return subprocess.Popen(
            words, cwd=root, env=environ, stdout=subprocess.DEVNULL, stderr=errors
        )


def test_ddp_under_torchrun_does_not_warn_of_unused_parameters(default, tmp_path):
    run = torchrun_of_an_mlp(default, tmp_path, steps=2)
    errors = tmp_path / "errors.txt"
    assert run.wait(300) == 0, errors.read_text()
    assert "find_unused_parameters" not in errors.read_text()


def test_ranks_end_with_a_torchrun_that_is_killed(default, tmp_path):
    run = torchrun_of_an_mlp(default, tmp_path, steps=1_000_000)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(metrics.exists, "the first logged step")
    ranks = children(run.pid)
    assert len(ranks) == 2
    run.kill()
    run.wait(300)
    wait_for(lambda: not any(map(is_there, ranks)), "the end of the ranks")


def test_configs_scripts_and_settings_speak_of_nothing_that_the_smallest_lacks(default):
    texts = ["configs/demo.toml", "configs/debug.toml", "launch/demo.sh", "my_project/settings.py"]
    text = "".join((default / file).read_text() for file in texts)
    for lacking in (
        "docs/",
        "anomaly",
        "nan is named",
        "standard library",
        "embedded",
        "my_project demo",
    ):
        assert lacking not in text


# ---- choices ----


def test_a_features_own_tests_settings_and_page_come_with_it(tmp_path, default):
    assert make(tmp_path, "--with", "ema") == 0
    root = tmp_path / "my_project"
    assert not (default / "tests/test_ema.py").exists()
    own = (root / "tests/test_ema.py").read_text()
    assert "def test_parameters_that_are_stored_in_bf16_have_a_float32_average" in own
    exported = "test_export_and_sample_use_the_average_unless_the_parameters_are_asked_for"
    assert exported not in own
    line = f"- ema: {TABLE['ema']['about']}; {TABLE['ema']['docs']} (`optim.ema`)"
    assert line in (root / "README.md").read_text()


def test_a_feature_that_needs_others_says_so_and_adds_them_with_yes(tmp_path, capsys):
    assert make(tmp_path, "--with", "diff") == 64
    said = "diff needs command_table, help, run_record, signals"
    assert f"error: {said}: name them too, or give --yes" in capsys.readouterr().err
    assert make(tmp_path, "--with", "diff", "--yes") == 0
    assert f"{said}\n" in capsys.readouterr().out
    assert (tmp_path / "my_project/my_project/commands/diff.py").exists()


def test_all_but_one_leaves_out_what_is_built_on_it():
    chosen = choose(of_projects(ROOT), ["console"], ["all"], ["sources"], yes=False)
    assert not {"sources", "hf_tasks", "parquet_view"} & set(chosen)
    assert {"console", "ema"} < set(chosen)


def test_features_have_other_names_that_people_look_for():
    assert named(["hf,packing", " ema"], TABLE) == ["hf_tasks", "sources", "ema"]


def test_on_a_terminal_it_asks_for_what_was_not_given(tmp_path, monkeypatch, capsys):
    answers = iter(["my_project", "ema, sgd", ""])
    monkeypatch.setattr("builtins.input", lambda text: next(answers))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    options = new.parse([], TABLE)
    assert named(options.wanted, TABLE) == ["ema", "sgd"]
    assert options.yes
    assert all(row["about"] in capsys.readouterr().out for row in [TABLE["ema"]])


def test_a_task_of_the_users_is_copied_and_trained(tmp_path):
    (tmp_path / "curve.py").write_text(f'"""A curve."""\n{TASK}')
    assert make(tmp_path, "--task", "curve.py:Curve") == 0
    root = tmp_path / "my_project"
    assert (root / "my_project/tasks/curve.py").exists()
    assert not (root / "my_project/tasks/example.py").exists()
    settings = (root / "my_project/settings.py").read_text()
    assert 'target: str = "my_project.tasks.curve:Curve"' in settings
    assert "my_project/tasks/curve.py" in (root / "README.md").read_text()


OPTIONAL_METHODS = """
    best_metric = "loss"

    def optimizer(self, groups, lr):
        return torch.optim.SGD(groups, lr=lr)

    def on_step(self, run, report):
        pass
"""


@pytest.mark.bad_input("`dist_amp new --task`: a task with methods that no chosen feature reads")
def test_a_task_brings_the_features_that_read_its_optional_methods(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("curve.py").write_text(f'"""A curve."""\n{TASK}{OPTIONAL_METHODS}')
    words = ["my_project", "--task", "curve.py:Curve"]
    assert new.main(words) == 64
    said = "optimizer by task_optimizer, on_step by callbacks, best_metric by best_checkpoint"
    assert f"features read: {said}; name them in --with" in capsys.readouterr().err
    assert new.main([*words, "--yes", "--without", "callbacks"]) == 64
    assert "callbacks is both asked for and left out" in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    assert new.main(["~/my_project", "--task", "~/curve.py:Curve", "--yes"]) == 0
    root = tmp_path / "my_project"
    for file in ("optimizers/groups.py", "supervise/callbacks.py"):
        assert (root / "my_project" / file).exists()
    python(root, "my_project.train", "--train.steps", "2", "--run.dir", "runs/mine")


@pytest.mark.bad_input("in a project: a task with a method that features read which it lacks")
def test_a_method_that_nothing_reads_in_a_project_is_refused_with_the_feature(tmp_path, default):
    (tmp_path / "curve.py").write_text(f'"""A curve."""\n{TASK}{OPTIONAL_METHODS}')
    words = ["my_project.train", "--task.target", f"{tmp_path}/curve.py:Curve"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=default, capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    assert "curve.py:Curve has best_metric, unread here: `adopt best_checkpoint`" in done.stderr


# ---- what is refused ----


BAD = [
    (["my-project"], "'my-project' can't be a package's name", "a name that can't be a package's"),
    (["class"], "'class' can't be a package's name", "a name that Python has reserved"),
    (["json"], "json is already a package", "a name that is already a package's"),
    (["tests"], "tests is a folder of each project", "a name of one of the project's folders"),
    (["tiny"], "tiny is a file of its tests", "a name of one of the project's test files"),
    (["taken"], "is not an empty folder", "a folder that is not empty"),
    (["no/where"], "there is no folder no", "a folder in one that does not exist"),
    (["x", "--with", "emma"], "no feature emma; did you mean ema?", "an unknown feature"),
    (["x", "--with", "hf", "--without", "sources"], "hf_tasks needs sources", "a contradiction"),
    (["x", "--with", "diff"], "diff needs command_table", "a feature without what it needs"),
    (["x", "--task", "no.py:T"], "must be FILE.py:Class", "a task's file that does not exist"),
    (["x", "--task", "task.py:T"], "there is no class T in task.py, which has", "a missing class"),
    (["x", "--task", "task.py:Mine"], "imports beside, which lies beside it", "two files"),
    ([], "give the project a name", "no name"),
]


@pytest.mark.bad_input("`dist_amp new`: a name or folder that is taken or can't be a package's")
@pytest.mark.bad_input("`dist_amp new`: a feature that does not exist, or needs another")
@pytest.mark.bad_input("`dist_amp new`: a task that can't be copied")
@pytest.mark.parametrize(("words", "said", "what"), BAD, ids=[row[2] for row in BAD])
def test_what_can_not_be_made_is_refused(tmp_path, monkeypatch, capsys, words, said, what):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("")
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "task.py").write_text("import beside\n\n\nclass Mine:\n    pass\n")
    before = sorted(tmp_path.rglob("*"))
    assert new.main(words) == 64, what
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.bad_input("`dist_amp new`: no git")
def test_without_git_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make(tmp_path) == 64
    assert "git is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bad_input("`dist_amp new`: interrupted, or a full disk")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch, capsys, error):
    def interrupted(names, folder):
        assert (folder / "dist_amp/train.py").exists()
        raise error

    monkeypatch.setattr(project, "delete", interrupted)
    assert make(tmp_path) == 1
    assert "error: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- any choice ----


def make_with(folder, features):
    """The project with these features and what they need."""
    assert make(folder, "--yes", "--with", ",".join(features), "--without", without(features)) == 0
    return folder / "my_project"


def stands_by_itself(folder, features):
    """Nothing is undefined, unused or of a wrong type."""
    root = make_with(folder, features)
    python(root, "ruff", "check", "--no-cache", "--select", "F", ".")
    assert nothing_is_dead(root)
    python(root, "mypy")


def without(features):
    return "console" if "console" not in features else ""


def nothing_is_dead(root):
    """Whether each definition has a user that had one in the whole package."""
    copy = root.parent / "renamed"
    shutil.copytree(root / "my_project", copy / "dist_amp")
    return not definitions_without_users(copy, names_in(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_project_with_one_feature_stands_by_itself(tmp_path, feature):
    stands_by_itself(tmp_path, [feature])


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_project_without_one_feature_stands_by_itself(tmp_path, feature):
    table = {name: TABLE[name] for name in FEATURES}
    gone = with_dependents([feature], table)
    stands_by_itself(tmp_path, [name for name in FEATURES if name not in gone])


def random_features(seed):
    draw = random.Random(seed)
    return draw.sample(FEATURES, draw.randrange(len(FEATURES)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RANDOM_SETS))
def test_a_project_with_random_features_stands_by_itself(tmp_path, seed):
    stands_by_itself(tmp_path, random_features(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", TESTED_SETS)
def test_a_project_with_random_features_passes_the_core_tests_trains_and_resumes(tmp_path, seed):
    root = make_with(tmp_path, random_features(seed))
    files = tomllib.loads((ROOT / "features.toml").read_text())["tests"]["every_project"]
    call(root, "bash", "launch/test.sh", "-q", *[file for file in files if (root / file).exists()])
    trains_and_resumes(root)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [name for name in FEATURES if TABLE[name].get("tests")])
def test_a_project_with_one_feature_passes_the_features_tests(tmp_path, feature):
    root = make_with(tmp_path, [feature])
    files = [file for file in TABLE[feature]["tests"] if (root / file).exists()]
    if files:
        call(root, "bash", "launch/test.sh", "-q", *files)


@pytest.mark.slow
def test_the_wheel_makes_projects_without_the_clone(tmp_path):
    built = built_wheel.build(built_wheel.copy_source(tmp_path / "source"), tmp_path)
    bin_folder = built_wheel.install(built, tmp_path / "environment")
    folder = tmp_path / "empty"
    folder.mkdir()
    done = built_wheel.run(bin_folder, folder, "dist_amp", "new", "my_project")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (folder / "my_project").iterdir())
    assert [name for name in names if name[0] != "."] == FILES
