"""dist_amp update and adopt: a project follows this repository by git merges, and loses no edit."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from project_edits import EDITS
from test_train import wait_for

from dist_amp.commands import adopt, base, new, update
from dist_amp.commands.base import find_base, git, initialise, run_git
from dist_amp.commands.features import of_projects, read_table, with_needs
from dist_amp.commands.project import Plan, fill
from dist_amp.distributed.signals import raise_on_signals

STATES = 8


def inside(folder, command, *words):
    """The exit status of a command called in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return command.main(list(words))
    finally:
        os.chdir(before)


def commit(project, what="an edit"):
    git(project, "add", "--all")
    git(project, "-c", "user.name=u", "-c", "user.email=u@u", "commit", "--quiet", "-m", what)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    assert inside(folder, new, "my_project") == 0
    return folder / "my_project"


@pytest.fixture
def project(made, tmp_path):
    shutil.copytree(made, tmp_path / "my_project")
    return tmp_path / "my_project"


def state_of(project):
    files = {path.name: path.read_bytes() for path in project.iterdir() if path.is_file()}
    return files, git(project, "status", "--porcelain"), git(project, "rev-parse", "--all")


def older(project):
    """Rewrite the base as an older version would have made it: another line in step.py."""
    path = project / "my_project/step.py"
    path.write_text(path.read_text().replace('"""', '"""Older. ', 1))
    commit(project, "Made by dist_amp 0.1.0, older")
    git(project, "branch", "--force", "dist_amp", "HEAD")


# ---- what they do ----


def test_a_feature_is_adopted_and_removed_beside_edits(project, capsys):
    step = project / "my_project/step.py"
    step.write_text(step.read_text() + "\n# mine\n")
    commit(project)
    before = git(project, "rev-parse", "HEAD^{tree}")
    assert inside(project, adopt, "ema") == 0
    assert capsys.readouterr().out.endswith("\nadded ema\n")
    assert (project / "my_project/optimizers/ema.py").exists()
    assert "ema:" in (project / "my_project/settings.py").read_text()
    assert step.read_text().endswith("# mine\n")
    assert inside(project, adopt, "--remove", "ema") == 0
    assert git(project, "rev-parse", "HEAD^{tree}") == before
    assert capsys.readouterr().out.endswith("\nremoved ema\n")
    assert inside(project, adopt, "--remove", "ema") == 0
    assert capsys.readouterr().out == "ema is not in the project\nnothing to do\n"
    assert inside(project, adopt, "console") == 0
    assert capsys.readouterr().out == "console is in the project already\nnothing to do\n"


def test_update_brings_what_is_new_and_a_dry_run_only_shows_it(project, capsys):
    older(project)
    before = state_of(project)
    assert inside(project, update, "--dry_run") == 0
    assert "my_project/step.py | 2 +-" in capsys.readouterr().out
    assert state_of(project) == before
    assert inside(project, update) == 0
    assert "Older." not in (project / "my_project/step.py").read_text()
    assert git(project, "log", "--format=%s", "-1").startswith("Merge dist_amp")
    capsys.readouterr()
    assert inside(project, update) == 0
    assert capsys.readouterr().out == "nothing to do\n"


def test_where_both_changed_a_line_git_reports_a_conflict_that_can_be_undone(project, capsys):
    older(project)
    step = project / "my_project/step.py"
    step.write_text(step.read_text().replace("Older.", "Mine."))
    commit(project)
    assert inside(project, update, "--dry_run") == 1
    assert "conflict  my_project/step.py" in capsys.readouterr().out
    head = git(project, "rev-parse", "HEAD")
    assert inside(project, update) == 1
    said = capsys.readouterr().out
    assert "my_project/step.py" in said
    assert "git merge --abort" in said
    assert "Mine." in step.read_text()
    git(project, "merge", "--abort")
    assert git(project, "rev-parse", "HEAD") == head
    assert inside(project, update) == 1  # not forgotten, though its base is on the branch


def test_a_dry_run_in_a_changed_tree_says_what_it_leaves_out(project, capsys):
    older(project)
    (project / "README.md").write_text("mine")
    before = state_of(project)
    assert inside(project, update, "--dry_run") == 0
    said = capsys.readouterr().out
    assert "changes that are not committed, in README.md; they are left out" in said
    assert "my_project/step.py | 2 +-" in said
    assert state_of(project) == before


def test_a_file_that_you_deleted_stays_deleted_by_what_the_conflict_names(project, capsys):
    older(project)
    git(project, "rm", "--quiet", "my_project/step.py")
    commit(project)
    (project / "stray.txt").write_text("not of the project")
    assert inside(project, update) == 1
    said = capsys.readouterr().out
    file = "my_project/step.py"
    assert f"  git rm {file}, which deletes it, or git add {file}, which keeps it" in said
    git(project, "rm", file)
    git(project, "-c", "user.name=u", "-c", "user.email=u@u", "commit", "--quiet", "--no-edit")
    assert not (project / file).exists()
    assert git(project, "status", "--porcelain") == "?? stray.txt"
    assert inside(project, update) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_an_edited_file_of_a_removed_feature_stays_by_git_add(project, capsys):
    assert inside(project, adopt, "ema") == 0
    file = "my_project/optimizers/ema.py"
    (project / file).write_text("# mine\n")
    commit(project)
    assert inside(project, adopt, "--remove", "ema") == 1
    said = capsys.readouterr().out
    assert f"git add {file}, which keeps it" in said
    assert "--all" not in said
    git(project, "add", file)
    git(project, "-c", "user.name=u", "-c", "user.email=u@u", "commit", "--quiet", "--no-edit")
    assert (project / file).read_text() == "# mine\n"


def test_settings_of_a_removed_feature_in_your_configs_are_warned_of(project, capsys):
    assert inside(project, adopt, "ema", "muon") == 0
    text = '[optim]\nlr = 0.1\nema = 0.98\nname = "muon"\n'
    (project / "configs/mine.toml").write_text(text)
    commit(project)
    capsys.readouterr()
    assert inside(project, adopt, "--remove", "ema,muon") == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: optim.ema in configs/mine.toml, line 3, was of the feature ema: remove it",
        "warning: optim.name in configs/mine.toml, line 4, was of the feature muon: remove it",
    ]
    assert (project / "configs/mine.toml").read_text() == text


@pytest.mark.parametrize("name", ["mine", "example", "causal_lm"])  # two are names of ours
def test_the_users_task_stays_through_an_update(tmp_path, name):
    text = "\n\nclass Mine:\n    pass\n\n\n"
    (tmp_path / f"{name}.py").write_text(text)
    assert inside(tmp_path, new, "my_project", "--task", f"{name}.py:Mine") == 0
    project = tmp_path / "my_project"
    older(project)
    assert inside(project, update) == 0
    assert (project / f"my_project/tasks/{name}.py").read_text() == text
    assert f"tasks.{name}:Mine" in (project / "my_project/settings.py").read_text()


def test_the_changelog_shows_what_concerns_the_projects_features(project):
    shown = "\n".join(update.changes(base_before_history(project), ["console"], ROOT))
    assert "**Packed rows on a GPU**" in shown  # no feature's name: shown
    assert "`parallel.cpu_offload`" in shown
    assert "projects without setting_checks" in shown
    for lacking in (
        "`precision.matmul",
        "**`dist_amp plan",
        "`state_dict()` and",
        "dist_amp.tokenize",
    ):
        assert lacking not in shown
    for of_a_clone in ("dist_amp new", "mkdocs", "devcontainer", "uv sync", "dist_amp.bench"):
        assert of_a_clone not in shown
    with_float8 = update.changes(base_before_history(project), ["float8"], ROOT)
    assert "`precision.matmul" in "\n".join(with_float8)
    with_all = "\n".join(update.changes(base_before_history(project), [*of_projects(ROOT)], ROOT))
    assert "`precision.matmul" in with_all
    assert "**`dist_amp plan" in with_all


def base_before_history(project):
    base = find_base(project)
    base.record["commit"] = ""
    return base


def test_a_clone_without_the_branch_still_finds_the_base(project, tmp_path):
    git(tmp_path, "clone", "--quiet", "--single-branch", str(project), "clone")
    assert find_base(tmp_path / "clone").commit == git(project, "rev-parse", "dist_amp")


# ---- what is refused ----


@pytest.mark.bad_input("`dist_amp update`, `adopt`: changes that are not committed")
@pytest.mark.parametrize("command", [(update,), (adopt, "ema")], ids=["update", "adopt"])
def test_a_project_with_uncommitted_changes_is_refused_and_not_touched(project, capsys, command):
    (project / "README.md").write_text("mine")
    before = state_of(project)
    assert inside(project, *command) == 64
    assert "README.md; commit or stash them" in capsys.readouterr().err
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: on the branch of the files as made")
def test_the_branch_of_the_base_is_not_merged_into(project, capsys):
    git(project, "switch", "--quiet", "dist_amp")
    before = state_of(project)
    assert inside(project, adopt, "ema") == 64
    assert "switch to the branch that you work on" in capsys.readouterr().err
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: a detached HEAD")
def test_a_detached_head_is_refused_and_not_touched(project, capsys):
    older(project)
    git(project, "switch", "--quiet", "--detach")
    before = state_of(project)
    assert inside(project, update) == 64
    said = capsys.readouterr().err
    assert "is on a detached HEAD; switch to the branch that you work on" in said
    assert "git switch BRANCH" in said
    assert state_of(project) == before
    assert git(project, "rev-parse", "HEAD") == git(project, "rev-parse", "main")


@pytest.mark.bad_input("`dist_amp update`, `adopt`: during a merge, rebase or cherry-pick")
@pytest.mark.parametrize(
    ("what", "finish"),
    [
        ("merge", "git commit"),
        ("rebase", "git rebase --continue"),
        ("cherry-pick", "git cherry-pick --continue"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--dry_run"]])
def test_a_pending_merge_is_refused_before_anything_moves(project, capsys, what, finish, words):
    older(project)
    user = ["-c", "user.name=u", "-c", "user.email=u@u"]
    git(project, "switch", "--quiet", "--create", "other", "HEAD~")
    (project / "README.md").write_text("theirs")
    commit(project)
    git(project, "switch", "--quiet", "main")
    (project / "README.md").write_text("mine")
    commit(project)
    assert run_git(project, *user, what, "other").returncode == 1
    before = state_of(project)
    assert inside(project, update, *words) == 64
    said = capsys.readouterr().err
    assert f"a {what} is in progress: finish it ({finish}) or undo it: git {what} --abort" in said
    assert state_of(project) == before
    git(project, what, "--abort")
    assert inside(project, update) == 0


@pytest.mark.bad_input("`dist_amp update`: a project of a newer version")
@pytest.mark.parametrize("line", ['version = "99.0"', f'commit = "{40 * "1"}"'])
def test_a_project_that_a_newer_version_made_is_refused(project, capsys, line):
    key = line.split()[0]
    text = (project / "pyproject.toml").read_text()
    head, _, tail = text.partition("[tool.dist_amp]")
    lines = [line if row.startswith(f"{key} =") else row for row in tail.splitlines()]
    if key == "version":
        lines = ['commit = ""' if row.startswith("commit") else row for row in lines]
    (project / "pyproject.toml").write_text("\n".join([f"{head}[tool.dist_amp]", *lines]))
    commit(project, "Made by dist_amp 99.0")
    git(project, "branch", "--force", "dist_amp", "HEAD")
    assert inside(project, update) == 64
    assert "newer than this one" in capsys.readouterr().err
    assert inside(project, adopt, "ema") == 64
    assert "run `dist_amp update` first" in capsys.readouterr().err


@pytest.mark.bad_input("`dist_amp update`, `adopt`: not in a project that `dist_amp new` made")
def test_what_is_no_project_is_refused(tmp_path, capsys):
    assert inside(tmp_path, update) == 64
    assert "is in no git repository" in capsys.readouterr().err
    git(tmp_path, "init", "--quiet")
    assert inside(tmp_path, update) == 64
    assert "has no commit" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    commit(tmp_path)
    assert inside(tmp_path, update) == 64
    assert "has no branch dist_amp" in capsys.readouterr().err
    git(tmp_path, "branch", "dist_amp")
    assert inside(tmp_path, update) == 64
    assert "git show failed" in capsys.readouterr().err


@pytest.mark.bad_input("`dist_amp adopt`: no feature, an unknown one, or one that needs another")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a feature to add"),
        (["emma"], "there is no feature emma; did you mean ema?"),
        (["nosuch"], "there is no feature nosuch; dist_amp new --help lists them"),
        (["ema", "--remove", "ema"], "ema is both asked for and left out; drop one of the two"),
        (["diff"], "diff needs command_table, help, run_record, signals: name them too"),
        (["diff", "--remove", "signals"], "diff needs signals, to be left out; drop one"),
    ],
)
def test_what_can_not_be_adopted_is_refused(project, capsys, words, said):
    before = state_of(project)
    assert inside(project, adopt, *words) == 64
    assert said in capsys.readouterr().err
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: a file that git does not track is in the way")
def test_an_untracked_file_in_the_way_is_kept(project, capsys):
    (project / "my_project/optimizers").mkdir()
    (project / "my_project/optimizers/ema.py").write_text("mine")
    before = state_of(project)
    assert inside(project, adopt, "ema") == 1
    assert "would be overwritten by merge" in capsys.readouterr().err
    assert (project / "my_project/optimizers/ema.py").read_text() == "mine"
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: interrupted")
@pytest.mark.parametrize("early", [["write-tree"], ["commit-tree"], ["merge-base"]])
def test_a_signal_before_the_merge_leaves_the_project_as_it_was(
    project, monkeypatch, capsys, early
):
    older(project)
    before = state_of(project)
    interrupt_at(early, monkeypatch)
    assert inside(project, update) == 1
    said = capsys.readouterr().err
    assert said == "error: stopped by SIGINT; the project is as it was\n"
    assert state_of(project) == before


@pytest.mark.bad_input("`dist_amp update`, `adopt`: interrupted while it merges")
@pytest.mark.parametrize(
    "late", [["update-ref"], ["merge"], ["rev-parse", "MERGE_HEAD"], ["status"]]
)
@pytest.mark.parametrize("conflicts", [False, True])
def test_a_signal_from_the_merge_on_changes_nothing_about_it(
    project, monkeypatch, capsys, late, conflicts
):
    older(project)
    step = project / "my_project/step.py"
    if conflicts:
        step.write_text(step.read_text().replace("Older.", "Mine."))
        commit(project)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    interrupt_at(late, monkeypatch)
    assert inside(project, update) == int(conflicts)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert ("then: git commit; or undo all: git merge --abort" in captured.out) == conflicts
    assert ("<<<<<<<" in step.read_text()) == conflicts
    assert git(project, "log", "--format=%s", "-1").startswith("Merge dist_amp") != conflicts
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def interrupt_at(words, monkeypatch):
    """SIGINT before and after the git command of a merge that has these words."""
    merging = []

    def interrupted(folder, *given, **environment):
        is_it = set(words) <= set(given) and (words != ["status"] or "--no-renames" in given)
        if is_it:
            os.kill(os.getpid(), signal.SIGINT)
        done = run_git(folder, *given, **environment)
        if is_it:
            merging.append(given)
            os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(base, "run_git", interrupted)
    monkeypatch.setattr(update, "run_git", interrupted)


@pytest.mark.bad_input("`dist_amp update`: Ctrl-C while git merges")
def test_ctrl_c_in_a_terminal_does_not_reach_a_git_that_merges(project, tmp_path):
    older(project)
    hook = project / ".git/hooks/pre-merge-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/merging\n"
        f"while [ ! -e {tmp_path}/interrupted ]; do sleep 0.05; done\n"
    )
    hook.chmod(0o755)
    command = [sys.executable, "-m", "dist_amp.update"]
    job = subprocess.Popen(
        command, cwd=project, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "merging").exists, "the merge")
    os.killpg(job.pid, signal.SIGINT)
    (tmp_path / "interrupted").touch()
    assert "stopped" not in job.communicate()[1]
    assert job.returncode == 0
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "log", "--format=%s", "-1").startswith("Merge dist_amp")


@pytest.mark.slow
@pytest.mark.bad_input("`dist_amp update`: interrupted")
def test_an_update_that_is_interrupted_anywhere_is_done_or_not_begun(project):
    older(project)
    before = state_of(project)
    saved = project.parent / "saved"
    shutil.copytree(project, saved)
    command = [sys.executable, "-m", "dist_amp.update"]
    outcomes = []
    for tenths in range(10, 140, 8):
        shutil.rmtree(project)
        shutil.copytree(saved, project)
        job = subprocess.Popen(command, cwd=project, start_new_session=True)
        time.sleep(tenths / 10)
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGINT)
        job.wait()
        is_done = "Older." not in (project / "my_project/step.py").read_text()
        outcomes.append(is_done)
        assert git(project, "status", "--porcelain") == ""
        if not is_done:
            assert state_of(project) == before
    assert False in outcomes


# ---- eight earlier states x twelve projects ----


def earlier_states(number):
    """Commits of this repository, from one of STATES evenly spread ones on to older ones."""
    history = ["log", "--first-parent", "--format=%H", "--", "features.toml"]
    commits = run_git(ROOT, *history).stdout.split()
    return commits[(number + 1) * len(commits) // (STATES + 1) :]


def earlier_project(number, folder):
    """(commit, project, its features) of a state whose table fits its code, as a release's must."""
    for commit in earlier_states(number)[:5]:
        try:
            return commit, *earlier_base(commit, folder / commit, ["console", "sgd", "ema"])
        except ValueError:
            continue
    pytest.skip("needs the repository's history")


def earlier_base(commit, folder, features):
    """What `dist_amp new` would have made of an earlier state; its tests by today's table."""
    source = folder / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x"], cwd=source, input=archive.stdout, check=True)
    shutil.copytree(ROOT / "template", source / "template", dirs_exist_ok=True)
    text = (source / "features.toml").read_text()
    if "every_project" not in text:
        today = (ROOT / "features.toml").read_text()
        every = tomllib.loads(today)["tests"]["every_project"]
        every = [file for file in every if (source / file).exists()]
        files = [
            part for part in today.split('[tests."')[1:] if (source / part.split('"')[0]).exists()
        ]
        text = text.partition("[tests")[0] + f"[tests]\nevery_project = {json.dumps(every)}\n"
        text += "".join(f'[tests."{part}' for part in files)
        (source / "features.toml").write_text(text)
    table = read_table(source)
    chosen = [name for name in table if name in with_needs(set(features) & set(table), table)]
    project = folder / "my_project"
    fill(project, Plan("my_project", tuple(chosen)), source)
    initialise(project, tuple(chosen))
    return project, chosen


@pytest.mark.slow
@pytest.mark.parametrize("number", range(STATES))
def test_twelve_edited_projects_of_an_earlier_state_are_updated_and_lose_nothing(tmp_path, number):
    state, base, features = earlier_project(number, tmp_path)
    table = of_projects(ROOT)
    chosen = tuple(name for name in table if name in with_needs(set(features) & set(table), table))
    merged = conflicted = 0
    for edit in EDITS:
        project = tmp_path / edit.__name__
        shutil.copytree(base, project)
        texts = edit(project)
        commit(project)
        before = find_base(project)
        with raise_on_signals():
            update.rebase(before, chosen, ROOT)
        conflicts = set(git(project, "diff", "--name-only", "--diff-filter=U").splitlines())
        made = git(project, "rev-parse", "dist_amp")
        files = changed(project, before, made) | changed(project, before, "HEAD")
        merged += len(files)
        conflicted += len(conflicts)
        print(f"{state[:7]} {edit.__name__}: {len(conflicts)} of {len(files)}", *conflicts)
        for text in texts:
            assert is_somewhere(project, text), f"{edit.__name__}: {text!r} is lost"
    print(f"{state[:7]}: {conflicted} of {merged} files conflict")
    assert conflicted <= 0.05 * merged


def changed(project, base, commit):
    """The files that differ from the base before."""
    return set(git(project, "diff", "--name-only", base.commit, commit).splitlines())


def is_somewhere(project, text):
    paths = [path for path in project.rglob("*") if path.is_file() and ".git/" not in str(path)]
    return any(text in path.read_text(errors="replace") for path in paths)
