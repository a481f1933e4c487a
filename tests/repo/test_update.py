"""dist_amp adopt and update: other features and newer versions reach a project by a git merge."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from dist_amp.commands import adopt, new, update
from dist_amp.errors import ConfigError

FILES = ("pyproject.toml", "Dockerfile", "tests/conftest.py", "tests/core/test_step.py")
RUN_NEW = update.run_new
USER = ["-c", "user.name=u", "-c", "user.email=u@u"]


def git(folder, *words):
    done = subprocess.run(["git", *USER, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def commit(folder, message="An edit"):
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--no-verify", "-m", message)


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1, f"{path} has no {old}"
    path.write_text(text.replace(old, new, 1))


def new_in_this_process(source, folder, *words):
    """What update.run_new does, with the files of the source and without its interpreter."""
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(new, "shipped_folder", lambda: source)
        package = SimpleNamespace(__file__=f"{source}/dist_amp/x.py", __version__="0.1.0")
        patch.setattr(new, "dist_amp", package)
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()) as said:
            status = new.main(words)
    if status:
        raise ConfigError(errors.getvalue().removeprefix("error: ").strip())
    return said.getvalue()


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
    git(source, "init", "--quiet", "--initial-branch=main")
    commit(source, "dist_amp")
    new_in_this_process(source, folder, "my_project", "--with", "ema")
    return folder


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made / "source", tmp_path / "source"))


@pytest.fixture
def project(made, source, tmp_path, monkeypatch):
    """The project, with a clone of its own as its source; it is the current folder."""
    root = Path(shutil.copytree(made / "my_project", tmp_path / "my_project"))
    edit(root / "pyproject.toml", str(made / "source"), str(source))
    amend(root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(update, "run_new", new_in_this_process)
    return root


def amend(root):
    """As if the project had been made so."""
    git(root, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(root, "branch", "--force", "dist_amp")


def newer(source, *files):
    """A later commit of dist_amp, in which these files begin in another way."""
    for file in files or ("dist_amp/step.py",):
        edit(source / file, '"""', '"""Newer. ')
    commit(source, "Newer")


def state_of(root):
    """All that a refused command must not change."""
    return git(root, "status", "--porcelain=v2", "--branch"), git(root, "for-each-ref")


# ---- what they do ----


def test_a_feature_is_adopted_and_removed_beside_edits(project, source):
    step = project / "dist_amp/step.py"
    step.write_text(step.read_text() + "\n# mine\n")
    commit(project)
    before = git(project, "rev-parse", "HEAD^{tree}")
    newer(source, "dist_amp/optimizers/ema.py")
    assert adopt.main(["muon,slurm"]) == 0
    for file in ("dist_amp/optimizers/muon.py", "launch/slurm.sbatch", "launch/many_nodes.sh"):
        assert (project / file).read_bytes() == (source / file).read_bytes()
    assert "Newer." not in (project / "dist_amp/optimizers/ema.py").read_text(), "the same commit"
    assert adopt.main(["--remove", "muon", "--remove", "many_nodes,slurm"]) == 0
    assert git(project, "rev-parse", "HEAD^{tree}") == before


MARK = "# of this project"


def edit_in_many_ways(root):
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


def test_after_many_edits_an_update_conflicts_only_where_both_changed(
    project, source, capsys, monkeypatch
):
    monkeypatch.undo()  # here the source's new has a process of its own
    monkeypatch.chdir(project)
    kept = edit_in_many_ways(project)
    commit(project)
    files = [f"dist_amp/{name}.py" for name in ("step", "optimizers/ema", "optim", "settings")]
    edit(source / "configs/ddp_bf16.toml", "lr = 1e-3", "lr = 2e-3")
    edit(source / "template/README.md.in", "## Layout", "## The layout")
    (source / "dist_amp/commands/board.py").unlink()
    newer(source, *files, "template/example.py")
    assert update.main([]) == 1
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


def test_an_update_that_was_aborted_is_not_forgotten(project, source, capsys):
    edit(project / "dist_amp/step.py", '"""', '"""Mine. ')
    commit(project)
    newer(source)
    for _ in range(2):
        assert update.main([]) == 1
        git(project, "merge", "--abort")
    git(project, "reset", "--quiet", "--hard", "HEAD^")
    assert update.main([]) == 0
    assert git(project, "log", "-1", "--format=%s").startswith("Merge dist_amp 0.1.0 with ")
    assert "dist_amp/step.py | 2 +-" in capsys.readouterr().out
    assert update.main([]) == 0
    assert capsys.readouterr().out == "nothing to do\n"


def test_a_project_of_the_version_before_is_brought_to_this_one(project, source, tmp_path):
    """Its record had no name; and its own update calls new in this way."""
    edit(
        project / "pyproject.toml",
        'name = "my_project"\nversion = "0.1.0"\ncommit',
        'version = "0.1.0"\ncommit',
    )
    amend(project)
    newer(source)
    assert update.main([]) == 0
    record = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["dist_amp"]
    assert (record["name"], record["commit"]) == ("my_project", git(source, "rev-parse", "HEAD"))
    words = f"tiny --like {project}/pyproject.toml --with= --without= --task".split()
    new_in_this_process(source, tmp_path, *words, f"{project}/my_project/task.py:Example")
    assert git(tmp_path / "tiny", "rev-parse", "main")


def test_a_plain_folder_is_a_source_as_it_stands(project, source):
    shutil.rmtree(source / ".git")
    edit(source / "dist_amp/step.py", '"""', '"""Newer. ')
    assert update.main([]) == 0
    assert '"""Newer. ' in (project / "dist_amp/step.py").read_text()


# ---- what is refused ----


def uncommitted(project, source):
    (project / "README.md").write_text("mine")


def on_its_branch(project, source):
    git(project, "switch", "--quiet", "dist_amp")


def made_by_a_newer_commit(project, source):
    newer(source)
    assert update.main([]) == 0
    git(source, "reset", "--quiet", "--hard", "HEAD^")


def made_by_a_newer_version(project, source):
    shutil.rmtree(source / ".git")
    edit(project / "pyproject.toml", 'version = "0.1.0"\ncommit', 'version = "99.0"\ncommit')
    amend(project)


def source_is_gone(project, source):
    shutil.rmtree(source)


def source_has_a_broken_feature(project, source):
    (source / "dist_amp/optimizers/muon.py").write_text("def f(:\n")
    commit(source)
    update.run_new = RUN_NEW  # a process of its own, whose last line is shown


def file_in_the_way(project, source):
    (project / "dist_amp/optimizers/muon.py").write_text("mine")


def no_branch(project, source):
    git(project, "branch", "--quiet", "-D", "dist_amp")


def no_git(project, source):
    shutil.rmtree(project / ".git")


def nothing(project, source):
    pass


BAD = [
    (uncommitted, update, "", "has changes in README.md; commit or stash them"),
    (on_its_branch, adopt, "muon", "switch to your own branch"),
    (made_by_a_newer_commit, update, "", "is newer than"),
    (made_by_a_newer_version, update, "", "made from version 99.0, which is newer than"),
    (source_is_gone, update, "", "does not exist; say where dist_amp is by `source` under"),
    (source_has_a_broken_feature, update, "", "muon.py: invalid syntax"),
    (file_in_the_way, adopt, "muon", "would be overwritten by merge: dist_amp/optimizers/muon.py"),
    (no_branch, update, "", "git fetch origin dist_amp:dist_amp"),
    (no_git, update, "", "not a git repository"),
    (nothing, adopt, "", "adopt: name a feature to add, or one to --remove that it has: "),
    (nothing, adopt, "emma", "there is no feature emma; did you mean ema?"),
    (nothing, adopt, "ema", "adopt ema: the project has it already"),
    (nothing, adopt, "--remove muon", "or one to --remove that it has: "),
    (nothing, adopt, "slurm --remove launch", "launch is needed by "),
]


@pytest.mark.bad_input(
    "`dist_amp update`, `adopt`: changes that are not committed, a file in the way"
)
@pytest.mark.bad_input("`dist_amp update`, `adopt`: outside a project, or on the branch as made")
@pytest.mark.bad_input("`dist_amp update`: a source that is older, gone or broken")
@pytest.mark.bad_input("`dist_amp adopt`: no feature, an unknown one, one that is there or needed")
@pytest.mark.parametrize(
    ("prepare", "command", "words", "said"),
    BAD,
    ids=[f"{row[0].__name__}-{row[2]}" for row in BAD],
)
def test_what_is_refused_says_why_in_one_line_and_changes_nothing(
    project, source, capsys, prepare, command, words, said
):
    prepare(project, source)
    before = state_of(project) if prepare is not no_git else None
    capsys.readouterr()
    assert command.main(words.split()) == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert before is None or state_of(project) == before
    if prepare is file_in_the_way:
        assert (project / "dist_amp/optimizers/muon.py").read_text() == "mine"


@pytest.mark.bad_input("`dist_amp update`, `adopt`: interrupted")
@pytest.mark.parametrize(
    ("word", "status"),
    [("fetch", 1), ("commit-tree", 1), ("merge", 0)],
)
def test_a_signal_before_the_merge_changes_nothing_and_a_later_one_does_not_stop_it(
    project, source, monkeypatch, capsys, word, status
):
    newer(source)
    before = state_of(project)
    real = update.run_git

    def interrupted(folder, *words):
        done = real(folder, *words)
        if word in words and "--show-current" not in words:
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(update, "run_git", interrupted)
    assert update.main([]) == status
    if status:
        said = "error: stopped by SIGINT; the project is as it was\n"
        assert (capsys.readouterr().err, state_of(project)) == (said, before)
    else:
        assert '"""Newer. ' in (project / "dist_amp/step.py").read_text()
        assert git(project, "diff", "HEAD", "dist_amp", "--") == ""
