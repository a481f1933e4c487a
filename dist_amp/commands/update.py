"""python -m dist_amp.update: bring a project that `dist_amp new` made to the newest version of its
source, which `source` under [tool.dist_amp] in pyproject.toml names: a clone's folder or address.

What that version makes with the project's choices is committed on the branch `dist_amp`, and merged
into the current one. Your edits stay; where both changed the same lines, git reports a conflict.
"""

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from dist_amp.distributed.signals import ignore_stop_signals
from dist_amp.errors import ConfigError, some_of
from dist_amp.supervise.command_line import Parser, command

BRANCH = "dist_amp"  # has the files as they were made, without later edits
SOURCE = "say where dist_amp is by `source` under [tool.dist_amp] in pyproject.toml"


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    Parser("python -m dist_amp.update", __doc__).parse_args(argv)
    root, record = find_project()
    return make_again(root, record, "HEAD")


def run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # A git hook's variables name another repository. In a new session, Ctrl-C does not reach git.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options: dict[str, Any] = {"capture_output": True, "text": True, "start_new_session": True}
    try:
        return subprocess.run(["git", *words], cwd=folder, env=environ, **options)
    except FileNotFoundError:
        raise ConfigError("git is missing, which keeps a project's history; install it") from None


def git(folder: Path, *words: str) -> str:
    """The output of a git command. Errors: ConfigError with git's message."""
    done = run_git(folder, *words)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"git {words[0]} failed: {reason}")
    return done.stdout.strip()


def user_of(folder: Path) -> list[str]:
    """Options for who commits, where git knows no user."""
    if git(folder, "config", "--default=", "user.email"):
        return []
    return ["-c", "user.name=dist_amp", "-c", "user.email=dist_amp@localhost"]


def find_project() -> tuple[Path, dict[str, Any]]:
    """The project in this folder, and [tool.dist_amp] of its pyproject.toml, with its name.

    Errors: ConfigError if nothing can be merged into it.
    """
    try:
        root = Path(git(Path(), "rev-parse", "--show-toplevel"))
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        record = {"name": settings["project"]["name"], **settings["tool"]["dist_amp"]}
        git(root, "rev-parse", "--verify", f"refs/heads/{BRANCH}")
    except (ConfigError, OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"this is not a project that `dist_amp new` made, with its branch {BRANCH}: {error}; "
            f"go to its folder, or fetch the branch: git fetch origin {BRANCH}:{BRANCH}"
        ) from None
    if changed := git(root, "diff", "--name-only", "HEAD").splitlines():
        raise ConfigError(f"{root} has changes in {some_of(changed)}; commit or stash them")
    if git(root, "branch", "--show-current") == BRANCH:
        raise ConfigError(f"{BRANCH} has the files as they were made; switch to your own branch")
    return root, record


def make_again(
    root: Path, record: dict[str, Any], commit: str, added: str = "", removed: str = ""
) -> int:
    """Make the project's files from a commit of its source, with other features, and merge them.

    added, removed: features, separated by commas. Returns the exit status: 1 for conflicts.
    """
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(record["source"])
        if not source.is_dir() or (commit and (source / ".git").exists()):
            source = cloned(record, commit, Path(temporary, "source"))
        # The task as it was made, not as the user has it by now: a merge would see that as an edit.
        task = f"{record['name']}/task.py"
        git(root, f"--work-tree={temporary}", "restore", f"--source={BRANCH}", "--", task)
        words = ["--like", f"{root}/pyproject.toml", "--with", added, "--without", removed]
        words += ["--task", f"{temporary}/{task}:{record['task']}"]
        made = Path(temporary, "made")
        made.mkdir()
        print(run_new(source, made, record["name"], *words), end="")
        git(root, "fetch", "--quiet", str(made / record["name"]), "main")
    new = tomllib.loads(git(root, "show", "FETCH_HEAD:pyproject.toml"))["tool"]["dist_amp"]
    if Version(new["version"]) < Version(record["version"]):
        raise is_newer(record, f"version {record['version']}")
    return merge(root, f"dist_amp {new['version']} with {', '.join(new['features'])}")


def cloned(record: dict[str, Any], commit: str, folder: Path) -> Path:
    """The source at a commit. Errors: ConfigError if the project was made from a later one."""
    try:
        git(folder.parent, "clone", "--quiet", "--no-checkout", record["source"], str(folder))
        git(folder, "checkout", "--quiet", commit or "HEAD")
    except ConfigError as error:
        raise ConfigError(f"{error}; {SOURCE}") from None
    made_from = record["commit"] or "HEAD"
    if run_git(folder, "merge-base", "--is-ancestor", made_from, "HEAD").returncode:
        raise is_newer(record, f"commit {made_from[:7]}")
    return folder


def run_new(source: Path, folder: Path, *words: str) -> str:
    """The output of the source's `dist_amp new` in a folder."""
    environ = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "dist_amp.new", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"source {source}: {reason.removeprefix('error: ')}")
    return done.stdout


def is_newer(record: dict[str, Any], made_from: str) -> ConfigError:
    return ConfigError(
        f"the project was made from {made_from}, which is newer than {record['source']}, or not in "
        f"its history; update that, or {SOURCE}"
    )


def merge(root: Path, title: str) -> int:
    """Commit FETCH_HEAD's files on the branch, and merge that; returns the exit status."""
    user = user_of(root)
    commit = BRANCH
    if run_git(root, "diff", "--quiet", BRANCH, "FETCH_HEAD", "--").returncode:
        commit = git(root, *user, "commit-tree", "FETCH_HEAD^{tree}", "-p", BRANCH, "-m", title)
    if run_git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
        print("nothing to do")
        return 0
    # A signal would leave half of this, and the command would say that nothing has changed.
    ignore_stop_signals((signal.SIGINT, signal.SIGTERM))
    words = ["merge", "--no-ff", "--no-edit", "--stat", "-m", f"Merge {title}", commit]
    done = run_git(root, *user, *words)
    if done.returncode > 1:  # no conflict: it did not begin
        raise ConfigError(f"git merge failed: {' '.join(done.stderr.split())}")
    git(root, "branch", "--force", BRANCH, commit)
    print(done.stdout.strip())
    if done.returncode:
        print("resolve the conflicts, git add or git rm each file, then: git commit")
        print("or undo all: git merge --abort")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
