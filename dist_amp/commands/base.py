"""A project's base on its git branch `dist_amp`: the files as they were made, without later edits.

A new base is a commit on that branch, and reaches the project's files by a merge.
"""

import os
import shlex
import signal
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dist_amp
from dist_amp.distributed.signals import ignore_stop_signals
from dist_amp.errors import ConfigError, Failure, some_of

BRANCH = "dist_amp"
MADE_BY = "Made by dist_amp"  # begins the message of each of its commits
# What git waits for, and the file in .git that says so.
PENDING = {"rebase": "rebase-merge", "merge": "MERGE_HEAD", "cherry-pick": "CHERRY_PICK_HEAD"}


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
    environ = {"GIT_OPTIONAL_LOCKS": "0"}  # which a git that is killed would leave behind
    for name, value in os.environ.items():
        if not name.startswith("GIT_"):
            environ[name] = value
    environ.update(environment)
    # In a new session, the terminal's Ctrl-C does not reach git.
    command = ["git", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, start_new_session=True
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


def find_base(folder: Path, may_have_changes: bool = False) -> Base:
    """The newest base of the project in a folder.

    Errors: ConfigError if it is no project that `dist_amp new` made, or can't be merged into.
    """
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise ConfigError(f"{folder.resolve()} is in no git repository; go to the project's folder")
    root = Path(top.stdout.strip())
    if not commit_at(root, "HEAD"):
        raise ConfigError(f"{root} has no commit; commit the project first")
    check_branch(root)
    if changed := git(root, "diff", "--name-only", "HEAD").splitlines():
        said = f"{root} has changes that are not committed, in {some_of(changed)}"
        if not may_have_changes:
            raise ConfigError(f"{said}; commit or stash them")
        print(f"{said}; they are left out")
    commit = commit_at(root, f"refs/heads/{BRANCH}")
    if not commit:  # not fetched: what this branch was merged from
        commit = git(root, "log", "--max-count=1", "--format=%H", f"--grep=^{MADE_BY} ", "HEAD")
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


def check_branch(root: Path) -> None:
    """Errors: ConfigError unless a branch can be merged into."""
    folder = Path(git(root, "rev-parse", "--absolute-git-dir"))
    for what, file in PENDING.items():
        if (folder / file).exists():
            finish = "git commit" if what == "merge" else f"git {what} --continue"
            raise ConfigError(
                f"a {what} is in progress: finish it ({finish}) or undo it: git {what} --abort"
            )
    branch = run_git(root, "symbolic-ref", "--short", "HEAD").stdout.strip()
    if branch in ("", BRANCH):
        raise ConfigError(
            f"{root} is on {branch or 'a detached HEAD'}; switch to the branch that you work on, "
            f"not {BRANCH}, which holds the files as they were made: git switch BRANCH"
        )


def commit_at(root: Path, name: str) -> str:
    """The commit that a branch or the like is at; "" if there is none."""
    return run_git(root, "rev-parse", "--verify", "--quiet", name).stdout.strip()


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
    before = commit_at(base.root, "HEAD")
    words = ["merge", "--no-ff", "--no-edit", "-m", title, commit]
    # A signal would leave half of what follows, and the command would say that nothing changed.
    ignore_stop_signals((signal.SIGINT, signal.SIGTERM))
    # First: if this is killed before the merge, the next update merges.
    git(base.root, "update-ref", f"refs/heads/{BRANCH}", commit)
    done = run_git(base.root, *user_of(base.root), *words)
    if done.returncode and not commit_at(base.root, "MERGE_HEAD"):
        git(base.root, "update-ref", f"refs/heads/{BRANCH}", base.commit)
        raise Failure(f"git merge failed: {done.stderr.strip() or done.stdout.strip()}")
    if done.returncode == 0:
        print(git(base.root, "diff", "--stat", before, "HEAD"))
        return 0
    print(done.stdout.strip() or done.stderr.strip())
    say_how_to_resolve(base.root)
    return 1


def say_how_to_resolve(root: Path) -> None:
    """Print the git commands for each file in conflict."""
    print("resolve the conflicts, and tell git:")
    status = run_git(root, "status", "--porcelain", "-z", "--no-renames").stdout
    for entry in status.split("\0"):
        file = shlex.quote(os.path.relpath(root / entry[3:]))
        if entry[:2] in ("DU", "UD", "DD"):  # one side has deleted it
            print(f"  git rm {file}, which deletes it, or git add {file}, which keeps it")
        elif entry[:2] in ("UU", "AA", "AU", "UA"):
            print(f"  git add {file}")
    print("then: git commit; or undo all: git merge --abort")
