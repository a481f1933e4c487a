"""dist_amp adopt and update: other features and newer versions reach a project by a git merge."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT

from dist_amp.commands import adopt, base, update

PARTS = ("dist_amp", "template", "launch", "configs", "tests")
FILES = ("pyproject.toml", "Dockerfile", "CHANGELOG.md")
USER = ["-c", "user.name=u", "-c", "user.email=u@u"]


def git(folder, *words):
    done = subprocess.run(["git", *USER, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def commit(folder, message="An edit"):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--no-verify", "-m", message)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a clone of dist_amp, and a project with ema made from it."""
    folder = tmp_path_factory.mktemp("made")
    source = folder / "source"
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("together", "repo", "slow", "gpu"):  # which no project gets
        shutil.rmtree(source / "tests" / name)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    git(source, "init", "--quiet", "--initial-branch=main")
    (source / ".gitignore").write_text("__pycache__/\n")
    commit(source, "dist_amp")
    words = ["my_project", "--with", "ema"]
    command = [sys.executable, "-m", "dist_amp.new", *words]
    environ = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run(command, cwd=folder, env=environ, check=True)
    return folder


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


@pytest.fixture
def project(made, source, tmp_path):
    """The project, with a clone of its own as its source."""
    root = Path(shutil.copytree(made / "my_project", tmp_path / "my_project"))
    edit(root / "pyproject.toml", str(made / "source"), str(source))
    git(root, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(root, "branch", "--force", "dist_amp")
    return root


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1, f"{path} has no {old}"
    path.write_text(text.replace(old, new, 1))


def newer(source):
    """A later commit of dist_amp, whose step.py and ema.py begin in another way."""
    for file in ("step.py", "optimizers/ema.py"):
        edit(source / "dist_amp" / file, '"""', '"""Newer. ')
    edit(source / "CHANGELOG.md", "\n", "\n- Something is new.\n")
    commit(source, "Newer")


def inside(folder, command, *words):
    before = Path.cwd()
    os.chdir(folder)
    try:
        return command.main(words)
    finally:
        os.chdir(before)


def state_of(root):
    """All that a refused command must not change."""
    return git(root, "status", "--porcelain=v2", "--branch"), git(root, "for-each-ref")


# ---- what they do ----


def test_a_feature_is_adopted_and_removed_beside_edits(project, source, capsys):
    step = project / "dist_amp/step.py"
    step.write_text(step.read_text() + "\n# mine\n")
    commit(project)
    before = git(project, "rev-parse", "HEAD^{tree}")
    newer(source)
    assert inside(project, adopt, "muon,slurm") == 0
    assert "added muon, many_nodes, slurm\n" in capsys.readouterr().out
    for file in ("dist_amp/optimizers/muon.py", "launch/many_nodes.sh"):
        assert (project / file).read_bytes() == (source / file).read_bytes()
    assert "Newer." not in (project / "dist_amp/optimizers/ema.py").read_text(), "the same commit"
    assert inside(project, adopt, "--remove", "muon,many_nodes") == 0
    said = capsys.readouterr().out
    assert "without slurm, which need muon, many_nodes" in said
    assert "removed many_nodes, muon, slurm" in said
    assert git(project, "rev-parse", "HEAD^{tree}") == before


def test_update_brings_what_is_new_and_a_dry_run_only_shows_it(project, source, capsys):
    newer(source)
    before = state_of(project)
    assert inside(project, update, "--dry_run") == 0
    said = capsys.readouterr().out
    assert "- Something is new." in said
    assert "dist_amp/step.py           | 2 +-" in said
    assert state_of(project) == before
    assert inside(project, update) == 0
    assert '"""Newer. ' in (project / "dist_amp/step.py").read_text()
    assert git(project, "log", "-1", "--format=%s") == "Merge dist_amp 0.1.0"
    capsys.readouterr()
    assert inside(project, update) == 0
    assert capsys.readouterr().out == "nothing to do\n"


MARK = "# of this project"


def edit_in_ten_ways(root):
    """What people change; returns {file: text that must still be there}."""
    package = root / "dist_amp"
    kept = {}
    for file in ("train.py", "optimizers/ema.py", "telemetry/metrics.py", "config/help.py"):
        (package / file).write_text((package / file).read_text() + f"\n{MARK}\n")
        kept[f"dist_amp/{file}"] = MARK
    edit(package / "step.py", '"""', f'"""{MARK} ')
    edit(
        package / "settings.py",
        "class OptimConfig(Section):",
        f"class OptimConfig(Section):  {MARK}",
    )
    edit(root / "pyproject.toml", "dependencies = [\n", 'dependencies = [\n    "einops>=0.8",\n')
    edit(root / "configs/ddp_bf16.toml", "steps = 1000", "steps = 7")
    (root / "README.md").write_text(f"{MARK}\n")
    (root / "my_project/task.py").write_text(f"class Example:  {MARK}\n    pass\n")
    (root / "dist_amp/optimizers/mine.py").write_text(f"{MARK}\n")
    (package / "telemetry/console.py").unlink()
    (package / "optim.py").rename(package / "optimizing.py")
    more = "dist_amp/step.py dist_amp/settings.py README.md my_project/task.py"
    kept |= dict.fromkeys([*more.split(), "dist_amp/optimizers/mine.py"], MARK)
    return kept | {"pyproject.toml": '"einops>=0.8"', "configs/ddp_bf16.toml": "steps = 7"}


def test_after_ten_edits_an_update_conflicts_only_where_both_changed(project, source, capsys):
    kept = edit_in_ten_ways(project)
    commit(project)
    newer(source)
    edit(source / "dist_amp/optim.py", '"""', '"""Newer. ')
    edit(source / "dist_amp/settings.py", '"""', '"""Newer. ')
    edit(source / "configs/ddp_bf16.toml", "lr = 1e-3", "lr = 2e-3")
    edit(source / "template/README.md.in", "## Layout", "## The layout")
    (source / "dist_amp/commands/board.py").unlink()
    commit(source, "More")
    assert inside(project, update) == 1
    said = capsys.readouterr().out
    conflicts = git(project, "diff", "--name-only", "--diff-filter=U").splitlines()
    assert conflicts == ["README.md", "dist_amp/step.py"]
    assert "CONFLICT (content): Merge conflict in dist_amp/step.py" in said
    assert "git merge --abort" in said
    for file, text in kept.items():
        assert text in (project / file).read_text(), file
    for file in ("step.py", "optimizers/ema.py", "settings.py", "optimizing.py"):
        assert '"""Newer. ' in (project / "dist_amp" / file).read_text(), file
    assert "lr = 2e-3" in (project / "configs/ddp_bf16.toml").read_text()
    assert not (project / "dist_amp/telemetry/console.py").exists()
    git(project, "merge", "--abort")
    assert inside(project, update) == 1, "it is not forgotten"


def test_the_task_as_made_stays_the_base_when_the_templates_example_changes(project, source):
    edit(source / "template/example.py", '"""', '"""Newer. ')
    commit(source, "Newer")
    assert inside(project, update) == 0
    assert git(project, "diff", "--stat", "HEAD^", "--", "my_project") == ""


def test_a_clone_without_the_branch_still_finds_the_base(project, tmp_path):
    git(tmp_path, "clone", "--quiet", "--single-branch", str(project), "clone")
    assert base.find_base(tmp_path / "clone").commit == git(project, "rev-parse", "dist_amp")


def test_a_source_that_moved_is_named_by_from_and_remembered(project, source, tmp_path):
    newer(source)
    source.rename(tmp_path / "elsewhere")
    url = f"file://{tmp_path}/elsewhere"
    assert inside(project, update, "--from", url) == 0
    record = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["dist_amp"]
    commit_there = git(tmp_path / "elsewhere", "rev-parse", "HEAD")
    assert (record["source"], record["commit"]) == (url, commit_there)


def test_a_plain_folder_is_a_source_as_it_stands(project, source):
    shutil.rmtree(source / ".git")
    edit(source / "dist_amp/step.py", '"""', '"""Newer. ')
    assert inside(project, update) == 0
    assert '"""Newer. ' in (project / "dist_amp/step.py").read_text()


# ---- what is refused ----


def uncommitted(project, source):
    (project / "README.md").write_text("mine")


def on_its_branch(project, source):
    git(project, "switch", "--quiet", "dist_amp")


def detached(project, source):
    git(project, "switch", "--quiet", "--detach")


def made_by_a_newer_commit(project, source):
    newer(source)
    assert inside(project, update) == 0
    git(source, "reset", "--quiet", "--hard", "HEAD^")


def made_by_a_newer_version(project, source):
    shutil.rmtree(source / ".git")
    edit(project / "pyproject.toml", "[tool.dist_amp]", "[tool.dist_amp]\n#")
    edit(project / "pyproject.toml", 'version = "0.1.0"\ncommit', 'version = "99.0"\ncommit')
    commit(project, "Made by dist_amp 99.0")
    git(project, "branch", "--force", "dist_amp")


def made_before_packages_kept_their_name(project, source):
    edit(project / "pyproject.toml", "source = ", "was = ")
    commit(project, "Made by dist_amp 0.1.0")
    git(project, "branch", "--force", "dist_amp")


def source_is_gone(project, source):
    shutil.rmtree(source)


def source_is_something_else(project, source):
    shutil.rmtree(source / ".git")
    shutil.rmtree(source / "dist_amp/commands")


def file_in_the_way(project, source):
    (project / "dist_amp/optimizers/muon.py").write_text("mine")


def merging(project, source):
    (project / ".git/MERGE_HEAD").write_text(git(project, "rev-parse", "HEAD"))


BAD = [
    (uncommitted, update, "", "has changes that are not committed, in README.md; commit or stash"),
    (on_its_branch, adopt, "muon", "is on dist_amp; switch to the branch that you work on"),
    (detached, update, "", "is on a detached HEAD; switch to the branch that you work on"),
    (merging, update, "", "a merge is in progress; git commit, or git merge --abort"),
    (made_by_a_newer_commit, update, "", "newer than the source's commit"),
    (made_by_a_newer_version, update, "", "made by dist_amp 99.0"),
    (made_before_packages_kept_their_name, update, "", "dist_amp new NAME --task FILE.py:Class"),
    (source_is_gone, update, "", "does not exist; say where they are: --from PATH_OR_URL"),
    (source_is_something_else, adopt, "muon", "has no dist_amp/commands/new.py; say where"),
    (file_in_the_way, adopt, "muon", "would be overwritten by merge: dist_amp/optimizers/muon.py"),
    (None, adopt, "", "adopt: name a feature to add, or to --remove; it has demo, launch"),
    (None, adopt, "emma", "there is no feature emma; did you mean ema?"),
    (None, adopt, "ema", "adopt ema: the project has it already"),
    (None, adopt, "--remove muon", "adopt --remove muon: the project does not have it; it has"),
    (None, adopt, "slurm --remove launch", "slurm needs launch, which is to be left out"),
]


@pytest.mark.bad_input("`dist_amp update`, `adopt`: changes that are not committed, a merge begun")
@pytest.mark.bad_input("`dist_amp update`, `adopt`: on the branch of the files as made, or none")
@pytest.mark.bad_input("`dist_amp update`: a project of a newer version, or of an old one's form")
@pytest.mark.bad_input("`dist_amp update`, `adopt`: a source that is gone, a file in the way")
@pytest.mark.bad_input("`dist_amp adopt`: no feature, an unknown one, or one that is there already")
@pytest.mark.parametrize(
    ("prepare", "command", "words", "said"),
    BAD,
    ids=[f"{row[0].__name__ if row[0] else 'words'}-{row[2]}" for row in BAD],
)
def test_what_is_refused_says_why_in_one_line_and_changes_nothing(
    project, source, capsys, prepare, command, words, said
):
    if prepare is not None:
        prepare(project, source)
    before = state_of(project)
    capsys.readouterr()
    assert inside(project, command, *words.split()) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert state_of(project) == before
    if prepare is file_in_the_way:
        assert (project / "dist_amp/optimizers/muon.py").read_text() == "mine"


@pytest.mark.bad_input("`dist_amp update`, `adopt`: not in a project that `dist_amp new` made")
def test_what_is_no_project_is_refused(tmp_path, capsys):
    assert inside(tmp_path, update) == 64
    assert "is in no git repository; go to the project's folder" in capsys.readouterr().err
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    assert inside(tmp_path, update) == 64
    assert "has no branch dist_amp" in capsys.readouterr().err
    git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", "An edit")
    git(tmp_path, "branch", "dist_amp")
    assert inside(tmp_path, update) == 64
    assert "git show failed" in capsys.readouterr().err


@pytest.mark.bad_input("`dist_amp update`, `adopt`: interrupted")
@pytest.mark.parametrize("words", [["clone"], ["fetch"], ["commit-tree"]])
def test_a_signal_before_the_merge_leaves_the_project_as_it_was(
    project, source, monkeypatch, capsys, words
):
    newer(source)
    before = state_of(project)
    interrupt_at(words, monkeypatch)
    assert inside(project, update) == 1
    assert capsys.readouterr().err == "error: stopped by SIGINT; the project is as it was\n"
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: interrupted while it merges")
@pytest.mark.parametrize("words", [["update-ref"], ["merge"]])
def test_a_signal_from_the_merge_on_changes_nothing_about_it(
    project, source, monkeypatch, capsys, words
):
    newer(source)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupt_at(words, monkeypatch)
    assert inside(project, update) == 0
    assert capsys.readouterr().err == ""
    assert git(project, "log", "-1", "--format=%s") == "Merge dist_amp 0.1.0"
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def interrupt_at(words, monkeypatch):
    """SIGINT before and after the git command that has these words."""
    real = base.run_git

    def interrupted(folder, *given):
        is_it = set(words) <= set(given)
        if is_it:
            os.kill(os.getpid(), signal.SIGINT)
        done = real(folder, *given)
        if is_it:
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(base, "run_git", interrupted)
