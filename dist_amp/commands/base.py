"""A project's base on its git branch `dist_amp`: the files as they were made, without later edits.

A new base is a commit on that branch, and reaches the project's files by a merge.
"""

import os
import signal
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dist_amp
from dist_amp.distributed.signals import handle_signals
from dist_amp.errors import ConfigError, Failure

BRANCH = "dist_amp"
MADE_BY = "Made by dist_amp"  # begins the message of each of its commits


@dataclass(frozen=True)
class Base:
    """root: the project's folder. record: [tool.dist_amp] of its pyproject.toml."""

    root: Path
    commit: str
    name: str
    record: dict[str, Any]

    @property
    def version(self) -> str:
        return f"{self.record['version']} ({self.record['commit'][:7] or 'no commit'})"


def git(folder: Path, *words: str, **environment: str) -> str:
    """The output of a git command. Errors: ConfigError with git's message."""
    done = run_git(folder, *words, **environment)
    if done.returncode:
        raise ConfigError(f"git {words[0]} failed: {done.stderr.strip()}; fix it, and repeat")
    return done.stdout.strip()


def run_git(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A git hook's variables name another repository.
    environ = {}
    for name, value in os.environ.items():
        if not name.startswith("GIT_"):
            environ[name] = value
    environ.update(environment)
    command = ["git", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def user_of(folder: Path) -> list[str]:
    """Options for who commits, where git knows no user."""
    if git(folder, "config", "--default=", "user.email"):
        return []
    return ["-c", "user.name=dist_amp", "-c", "user.email=dist_amp@localhost"]


def message(features: tuple[str, ...]) -> str:
    return f"{MADE_BY} {dist_amp.__version__}, with {', '.join(features) or 'no optional feature'}"


def initialise(folder: Path, features: tuple[str, ...]) -> None:
    """Make the repository of a new project; its first commit is the first base."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    words = ["-c", "commit.gpgsign=false", "commit", "--quiet", "--no-verify"]
    git(folder, *user_of(folder), *words, "--message", message(features))
    git(folder, "branch", BRANCH)


def find_base(folder: Path) -> Base:
    """The newest base of the project in a folder.

    Errors: ConfigError if it is no project that `dist_amp new` made, or has uncommitted changes.
    """
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise ConfigError(f"{folder.resolve()} is in no git repository; go to the project's folder")
    root = Path(top.stdout.strip())
    if run_git(root, "rev-parse", "--verify", "--quiet", "HEAD").returncode:
        raise ConfigError(f"{root} has no commit; commit the project first")
    if run_git(root, "symbolic-ref", "--short", "HEAD").stdout.strip() == BRANCH:
        raise ConfigError(
            f"{root} is on the branch {BRANCH}, which holds the files as they were made; "
            "switch to the branch that you work on: git switch main"
        )
    if changed := git(root, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise ConfigError(
            f"{len(changed)} files of {root} have changes that are not committed, such as "
            f"{changed[0].split()[-1]}; commit or stash them"
        )
    commit = newest_base(root)
    if not commit:
        raise ConfigError(
            f"{root} has no branch {BRANCH}, and no commit that `dist_amp new` made; if the branch "
            f"is elsewhere: git fetch origin {BRANCH}:{BRANCH}"
        )
    try:
        project = tomllib.loads(git(root, "show", f"{commit}:pyproject.toml"))
        return Base(root, commit, project["project"]["name"], project["tool"]["dist_amp"])
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"pyproject.toml in branch {BRANCH}, commit {commit[:7]}, lacks {error}, which "
            "`dist_amp new` wrote; that branch must not be edited"
        ) from None


def newest_base(root: Path) -> str:
    """Of the branch; where that was not fetched, of what this branch was merged from; or ""."""
    branch = run_git(root, "rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}")
    if branch.returncode == 0:
        return branch.stdout.strip()
    return git(root, "log", "--max-count=1", "--format=%H", f"--grep=^{MADE_BY} ", "HEAD")


def commit_files(base: Base, folder: Path, features: tuple[str, ...]) -> str:
    """A commit of these files after the base, on no branch yet; the base where nothing changed."""
    repository = git(base.root, "rev-parse", "--absolute-git-dir")
    with tempfile.TemporaryDirectory() as temporary:
        index = {"GIT_INDEX_FILE": f"{temporary}/index", "GIT_DIR": repository}
        git(folder, "--work-tree=.", "add", "--all", "--force", ".", **index)
        tree = git(folder, "write-tree", **index)
    if tree == git(base.root, "rev-parse", f"{base.commit}^{{tree}}"):
        return base.commit
    words = ["commit-tree", tree, "-p", base.commit, "-m", message(features)]
    return git(base.root, *user_of(base.root), *words)


def preview(base: Base, commit: str) -> int:
    """Print what a merge would change, and where it would conflict; returns the exit status."""
    words = ["merge-tree", "--write-tree", "--name-only", "--no-messages", "HEAD", commit]
    done = run_git(base.root, *words)
    if done.returncode > 1:
        raise ConfigError(f"git merge-tree failed: {done.stderr.strip()}; it needs git 2.38")
    tree, *conflicts = done.stdout.split("\n")
    print(git(base.root, "diff", "--stat", "HEAD", tree) or "no file would change")
    for file in filter(None, conflicts):
        print(f"conflict  {file}")
    return done.returncode


def merge(base: Base, commit: str, title: str) -> int:
    """Merge a new base into the current branch; returns the exit status: 1 for conflicts.

    Errors: Failure if git does not begin to merge; then nothing has changed.
    """
    before = git(base.root, "rev-parse", "HEAD")
    words = ["merge", "--no-ff", "--no-edit", "-m", title, commit]
    # A merge is not interrupted halfway.
    with handle_signals(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM)):
        done = run_git(base.root, *user_of(base.root), *words)
    begun = run_git(base.root, "rev-parse", "--verify", "--quiet", "MERGE_HEAD").returncode == 0
    if done.returncode and not begun:
        raise Failure(f"git merge failed: {done.stderr.strip() or done.stdout.strip()}")
    git(base.root, "update-ref", f"refs/heads/{BRANCH}", commit)
    if done.returncode == 0:
        print(git(base.root, "diff", "--stat", before, "HEAD"))
        return 0
    print(done.stdout.strip() or done.stderr.strip())
    print("resolve the conflicts, then: git add --all && git commit; or undo: git merge --abort")
    return 1
