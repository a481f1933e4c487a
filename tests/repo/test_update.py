"""dist_amp adopt and update: other features and newer versions reach a project by a git merge."""

import ast
import io
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from types import SimpleNamespace

import pytest
from conftest import ROOT

from dist_amp.commands import adopt, new, parts, update
from dist_amp.errors import ConfigError

FILES = ("pyproject.toml", "Dockerfile", "tests/conftest.py", "tests/core/test_step.py")
IS_VERSION = "s/^version = .*/version = '99.0'/"
run_new = update.run_new


def shell(folder, command):
    """The output of a command; git takes it that somebody commits."""
    user = dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL"), "u")
    user |= {name.replace("AUTHOR", "COMMITTER"): text for name, text in user.items()}
    options = {"cwd": folder, "env": os.environ | user, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-e", "-c", command], **options)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def commit(folder, *options):
    shell(folder, "git add --all; git commit --quiet --message 'An edit' " + " ".join(options))


def edit(path, old, new):
    text = path.read_text()
    assert old in text, f"{path} has no {old}"
    path.write_text(text.replace(old, new, 1))


def newer(source, *files):
    """A later commit of dist_amp, in which these files begin in another way."""
    for file in files or ("dist_amp/step.py",):
        edit(source / file, '"""', '"""Newer. ')
    commit(source)


@cache
def imports_in(text):
    return list(parts.imported(ast.parse(text)))


def new_in_this_process(source, folder, *words):
    """What update.run_new does, with the files of the source and without its interpreter."""
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "stdout", io.StringIO())
        patch.setattr(sys, "stderr", errors)
        patch.setattr(new, "shipped_folder", lambda: source)
        package = SimpleNamespace(__file__=f"{source}/dist_amp/x.py", __version__="0.1.0")
        patch.setattr(new, "dist_amp", package)
        for module in (new, parts):  # read once, not for each copy
            patch.setattr(module, "imports_of", lambda path: imports_in(path.read_text()))
        if new.main(words):
            raise ConfigError(errors.getvalue().removeprefix("error: ").strip())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a clone of dist_amp, and a project with ema made from it."""
    folder = tmp_path_factory.mktemp("made")
    source = folder / "source"
    for part in ("dist_amp", "template", "launch", "configs"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file)
    (source / ".gitignore").write_text("__pycache__/\n")
    shell(source, "git init --quiet --initial-branch=main")
    commit(source)
    new_in_this_process(source, folder, "my_project", "--with", "ema")
    for root in (source, folder / "my_project"):
        shell(root, "git gc --quiet")  # one file in place of hundreds to copy for each test
    return folder


@pytest.fixture
def project(made, tmp_path, monkeypatch):
    """The project; it is the current folder."""
    root = shutil.copytree(made / "my_project", tmp_path / "my_project")
    monkeypatch.chdir(root)
    monkeypatch.setattr(update, "run_new", new_in_this_process)
    return root


@pytest.fixture
def source(made, project):
    source = shutil.copytree(made / "source", project.parent / "source")
    edit(project / "pyproject.toml", str(made / "source"), str(source))
    as_made(project)
    return source


def as_made(project):
    commit(project, "--amend")
    shell(project, "git branch --force dist_amp")


def state_of(root):
    """All that a refused command must not change."""
    if not (root / ".git").exists():
        return sorted(root.rglob("*"))
    return shell(root, "git status --porcelain=v2 --branch; git diff")


# ---- what they do ----


def test_a_feature_is_adopted_and_removed_beside_edits(project, source):
    shell(project, "echo '# mine' >> dist_amp/step.py")
    commit(project)
    before = shell(project, "git rev-parse HEAD^{tree}")
    newer(source, "dist_amp/optimizers/ema.py")
    assert adopt.main(["muon,slurm"]) == 0
    for file in ("dist_amp/optimizers/muon.py", "launch/slurm.sbatch", "launch/many_nodes.sh"):
        assert (project / file).read_bytes() == (source / file).read_bytes()
    assert "Newer." not in (project / "dist_amp/optimizers/ema.py").read_text(), "the same commit"
    assert adopt.main(["--remove", "muon", "--remove", "many_nodes,slurm"]) == 0
    assert shell(project, "git rev-parse HEAD^{tree}") == before


MARK = "# of this project"


def edit_in_many_ways(root):
    """What people change; returns {file: text that must still be there}."""
    added = ("train", "optimizers/ema", "telemetry/metrics", "config/help", "optimizers/mine")
    for name in added:
        with (root / f"dist_amp/{name}.py").open("a") as file:
            file.write(f"\n{MARK}\n")
    edit(root / "dist_amp/step.py", '"""', f'"""{MARK} ')
    heading = "class OptimConfig(Section):"
    edit(root / "dist_amp/settings.py", heading, f"{heading}  {MARK}")
    edit(root / "pyproject.toml", "dependencies = [\n", 'dependencies = [\n    "einops>=0.8",\n')
    edit(root / "configs/ddp_bf16.toml", "steps = 1000", "steps = 7")
    (root / "README.md").write_text(f"{MARK}\n")
    (root / "my_project/task.py").write_text(f"class Example:  {MARK}\n    pass\n")
    (root / "dist_amp/telemetry/console.py").unlink()
    (root / "dist_amp/optim.py").rename(root / "dist_amp/optimizing.py")
    marked = [f"dist_amp/{name}.py" for name in (*added, "step", "settings")]
    kept = dict.fromkeys([*marked, "README.md", "my_project/task.py"], MARK)
    return kept | {"pyproject.toml": '"einops>=0.8"', "configs/ddp_bf16.toml": "steps = 7"}


def test_after_many_edits_an_update_conflicts_only_where_both_changed(
    project, source, capsys, monkeypatch
):
    monkeypatch.setattr(update, "run_new", run_new)  # here the source's new has its own process
    edit(
        project / "pyproject.toml", 'name = "my_project"\nversion = "0.1.0"\nc', "version = '0'\nc"
    )
    as_made(project)  # by an earlier version, whose record had no name
    kept = edit_in_many_ways(project)
    commit(project)
    files = [f"dist_amp/{name}.py" for name in ("step", "optimizers/ema", "optim", "settings")]
    edit(source / "configs/ddp_bf16.toml", "lr = 1e-3", "lr = 2e-3")
    edit(source / "template/README.md.in", "## Layout", "## The layout")
    (source / "dist_amp/commands/board.py").unlink()
    newer(source, *files, "template/NAME/task.py")
    assert update.main([]) == 1
    said = capsys.readouterr().out
    conflicts = shell(project, "git diff --name-only --diff-filter=U").splitlines()
    assert conflicts == ["README.md", "dist_amp/step.py"]
    assert "CONFLICT (content): Merge conflict in dist_amp/step.py" in said
    assert "git merge --abort" in said
    for file, text in kept.items():
        assert text in (project / file).read_text(), file
    for file in ("step.py", "optimizers/ema.py", "settings.py", "optimizing.py"):
        assert '"""Newer. ' in (project / "dist_amp" / file).read_text(), file
    assert "lr = 2e-3" in (project / "configs/ddp_bf16.toml").read_text()
    assert not (project / "dist_amp/telemetry/console.py").exists()
    record = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["dist_amp"]
    newest = shell(source, "git rev-parse HEAD")
    assert (record["name"], record["commit"]) == ("my_project", newest)


def test_an_update_that_was_aborted_is_not_forgotten(project, source, capsys):
    edit(project / "dist_amp/step.py", '"""', '"""Mine. ')
    commit(project)
    newer(source)
    assert update.main([]) == 1
    shell(project, "git merge --abort; git reset --quiet --hard HEAD^")
    assert update.main([]) == 0
    assert shell(project, "git log -1 --format=%s").startswith("Merge dist_amp 0.1.0 with ")
    assert "dist_amp/step.py | 2 +-" in capsys.readouterr().out
    assert update.main([]) == 0
    assert capsys.readouterr().out == "Already up to date.\n"


def test_a_plain_folder_is_a_source_as_it_stands_and_a_name_that_is_taken_by_now_stays(
    project, source, tmp_path
):
    shutil.rmtree(source / ".git")
    edit(source / "dist_amp/step.py", '"""', '"""Newer. ')
    assert update.main([]) == 0
    assert '"""Newer. ' in (project / "dist_amp/step.py").read_text()
    words = f"torch --like {project}/pyproject.toml --with= --without= --task".split()
    new_in_this_process(source, tmp_path, *words, f"{project}/my_project/task.py:Example")
    assert (tmp_path / "torch/torch/task.py").exists()


# ---- what is refused ----

BAD = [  # what came before, the command, and a part of its line
    (
        "echo mine >> dist_amp/step.py; sed -i '$a # Newer' ../source/dist_amp/step.py",
        "update",
        "local changes to the following files would be overwritten by merge: dist_amp/step.py",
    ),
    (
        f'rm -r ../source/.git; sed -i "{IS_VERSION}" pyproject.toml; git commit -qam Edited',
        "update",
        "has version 0.1.0, and the project was made from 99.0",
    ),
    ("rm -r ../source", "update", "does not exist; name another `source` under [tool.dist_amp]"),
    (
        "cd ../source; echo 'def f(:' >> dist_amp/optimizers/ema.py; git commit -qam Broken",
        "update",
        "invalid syntax (ema.py, line",
    ),
    ("rm -rf .git", "update", "not a git repository"),
    ("", "adopt", "give a feature to add, or --remove FEATURE"),
    ("", "adopt ema", "adopt ema: the project already has it"),
    ("", "adopt emma", "there is no feature emma; did you mean ema?"),
]


@pytest.mark.bad_input("`dist_amp update`, `adopt`: changes that are not committed; no project")
@pytest.mark.bad_input("`dist_amp update`: a source that is older, gone or broken")
@pytest.mark.bad_input("`dist_amp adopt`: no feature, an unknown one, or one that is there")
@pytest.mark.parametrize(("before", "command", "said"), BAD)
def test_what_is_refused_says_why_in_one_line_and_changes_nothing(
    project, request, capsys, before, command, said
):
    if "../source" in before:
        request.getfixturevalue("source")
    if "Broken" in before:
        update.run_new = run_new  # a process of its own, whose last line is shown
    shell(project, before)
    state = state_of(project)
    name, *words = command.split()
    assert {"adopt": adopt, "update": update}[name].main(words) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert state_of(project) == state
