"""A project's base on its git branch `dist_amp`: the files as they were made, without later edits.

`dist_amp new` of the source, a clone of dist_amp, makes them again, with other features or of a
newer version. They become the next commit of that branch, and reach the project by a merge.
"""

import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from packaging.version import Version

from dist_amp.distributed.signals import ignore_stop_signals
from dist_amp.errors import ConfigError, some_of
from dist_amp.supervise.command_line import Parser

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


def git(folder: Path, *words: str) -> str:
    """The output of a git command. Errors: ConfigError with git's message."""
    done = run_git(folder, *words)
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise ConfigError(f"git {words[0]} failed: {said}; fix it, and repeat")
    return done.stdout.strip()


def run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # A git hook's variables name another repository. Without optional locks, a git that is killed
    # leaves none behind. In a new session, the terminal's Ctrl-C does not reach git.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", *words]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, start_new_session=True
    )


def user_of(folder: Path) -> list[str]:
    """Options for who commits, where git knows no user."""
    if git(folder, "config", "--default=", "user.email"):
        return []
    return ["-c", "user.name=dist_amp", "-c", "user.email=dist_amp@localhost"]


def message(record: dict[str, Any]) -> str:
    features = ", ".join(record["features"]) or "no optional feature"
    return f"{MADE_BY} {record['version']}, with {features}"


def record_of(pyproject: str) -> tuple[str, dict[str, Any]]:
    """(the project's name, [tool.dist_amp]) in the text of a pyproject.toml."""
    content = tomllib.loads(pyproject)
    return content["project"]["name"], content["tool"]["dist_amp"]


def find_base(folder: Path, may_have_changes: bool = False) -> Base:
    """The newest base of the project in a folder.

    Errors: ConfigError if it is no project that `dist_amp new` made, or can't be merged into.
    """
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top.returncode:
        raise ConfigError(f"{folder.resolve()} is in no git repository; go to the project's folder")
    root = Path(top.stdout.strip())
    branch = run_git(root, "symbolic-ref", "--short", "HEAD").stdout.strip()
    if branch in ("", BRANCH):
        raise ConfigError(
            f"{root} is on {branch or 'a detached HEAD'}; switch to the branch that you work on, "
            f"not {BRANCH}, which holds the files as they were made: git switch BRANCH"
        )
    if run_git(root, "rev-parse", "--verify", "MERGE_HEAD").returncode == 0:
        raise ConfigError(f"{root}: a merge is in progress; git commit, or git merge --abort")
    if changed := run_git(root, "diff", "--name-only", "HEAD").stdout.splitlines():
        said = f"{root} has changes that are not committed, in {some_of(changed)}"
        if not may_have_changes:
            raise ConfigError(f"{said}; commit or stash them")
        print(f"{said}; they are left out")
    commit = run_git(root, "rev-parse", "--verify", "--quiet", f"refs/heads/{BRANCH}").stdout
    if not commit:  # not fetched: what this branch was merged from
        commit = run_git(root, "log", "-1", "--format=%H", f"--grep=^{MADE_BY} ", "HEAD").stdout
    if not commit:
        raise ConfigError(
            f"{root} has no branch {BRANCH}, and no commit that `dist_amp new` made; go to a "
            f"project's folder, or fetch the branch: git fetch origin {BRANCH}:{BRANCH}"
        )
    commit = commit.strip()
    try:
        name, record = record_of(git(root, "show", f"{commit}:pyproject.toml"))
        base = Base(root, commit, name, record)
        if "source" not in record:
            raise ConfigError(
                f"{root} was made by dist_amp {base.version}, before packages kept their name; "
                "make a new one beside it: dist_amp new NAME --task FILE.py:Class, your task's file"
            )
    except (KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"pyproject.toml in branch {BRANCH}, commit {commit[:7]}, lacks {error}, which "
            "`dist_amp new` wrote; that branch must not be edited"
        ) from None
    return base


def add_source(parser: Parser) -> None:
    about = "where dist_amp's files are, if not where they were"
    parser.add_argument("--from", dest="source", default="", metavar="PATH_OR_URL", help=about)


@contextmanager
def fetched(source: str, commit: str | None = None) -> Iterator[Path]:
    """A folder with a source's files at a commit, by default its newest; "": as they lie there."""
    folder = Path(source).expanduser()
    if folder.is_dir() and (commit == "" or not (folder / ".git").exists()):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary, "dist_amp")
        words = ["clone", "--quiet", "--shared", "--no-checkout", source, str(clone)]
        done = run_git(Path(temporary), *words)
        if done.returncode == 0:
            done = run_git(clone, "checkout", "--quiet", commit or "HEAD")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["git says nothing"])[0]
            raise ConfigError(
                f"dist_amp's files can't be fetched from source {source}: {reason}; say where they "
                "are: --from PATH_OR_URL"
            )
        yield clone


def rebase(
    base: Base,
    source: str,
    commit: str | None = None,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    dry_run: bool = False,
) -> int:
    """Make the base again from a source, and merge it; returns the exit status: 1 for conflicts.

    commit: of the source; its newest if None. Errors: ConfigError; then nothing has changed.
    """
    with fetched(source, commit) as folder, tempfile.TemporaryDirectory() as temporary:
        if commit is None:
            check_not_newer(base, folder)
        made = make_again(base, source, folder, Path(temporary), added, removed)
        git(base.root, "fetch", "--quiet", str(made), "main")
        _, record = record_of((made / "pyproject.toml").read_text(encoding="utf-8"))
    if Version(record["version"]) < Version(base.record["version"]):
        raise is_newer(base, f"version {record['version']}")
    tree = git(base.root, "rev-parse", "FETCH_HEAD^{tree}")
    new = base.commit
    if tree != git(base.root, "rev-parse", f"{base.commit}^{{tree}}"):
        words = ["commit-tree", tree, "-p", base.commit, "-m", message(record)]
        new = git(base.root, *user_of(base.root), *words)
    if run_git(base.root, "merge-base", "--is-ancestor", new, "HEAD").returncode == 0:
        print("nothing to do")
        return 0
    if dry_run:
        return preview(base, new)
    before = set(base.record["features"])
    for what, names in (
        ("added", [name for name in record["features"] if name not in before]),
        ("removed", sorted(before - set(record["features"]))),
    ):
        if names:
            print(f"{what} {', '.join(names)}")
    return merge(base, new, f"Merge dist_amp {record['version']}")


def check_not_newer(base: Base, folder: Path) -> None:
    """Errors: ConfigError if the project was made from a commit that is not in the clone's history.

    Prints what its changelog has that is new.
    """
    made_from = base.record["commit"]
    if not made_from or not (folder / ".git").exists():
        return
    if run_git(folder, "merge-base", "--is-ancestor", made_from, "HEAD").returncode:
        raise is_newer(base, f"commit {git(folder, 'rev-parse', '--short', 'HEAD')}")
    for line in git(folder, "diff", "-U0", made_from, "HEAD", "--", "CHANGELOG.md").splitlines():
        if line.startswith("+") and not line.startswith("+++"):
            print(line[1:])


def is_newer(base: Base, source: str) -> ConfigError:
    return ConfigError(
        f"{base.root} was made by dist_amp {base.version}, which is newer than the source's "
        f"{source}, or not in its history; update the source, or name another: --from PATH_OR_URL"
    )


def make_again(
    base: Base, source: str, folder: Path, into: Path, added: Sequence[str], removed: Sequence[str]
) -> Path:
    """Run the source's `dist_amp new` with the project's choices; returns what it made."""
    if not (folder / "dist_amp/commands/new.py").is_file():
        raise ConfigError(
            f"source {source} has no dist_amp/commands/new.py; say where dist_amp's files are: "
            "--from PATH_OR_URL"
        )
    # The task as it was made, not as the user has it by now: a merge would see that as an edit.
    task = run_git(base.root, "show", f"{base.commit}:{base.name}/task.py").stdout
    (into / "task.py").write_text(task, encoding="utf-8")
    record = {"tool": {"dist_amp": {**base.record, "source": source}}}
    (into / "like.toml").write_text(tomli_w.dumps(record), encoding="utf-8")
    words = ["--like", "like.toml", "--with", ",".join(added), "--without", ",".join(removed)]
    words += ["--task", f"task.py:{base.record['task']}"]
    done = subprocess.run(
        [sys.executable, "-m", "dist_amp.new", base.name, *words],
        cwd=into,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason"]
        raise ConfigError(said[-1].removeprefix("error: "))
    print(done.stdout, end="")
    return into / base.name


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

    Errors: ConfigError if git does not begin to merge; then nothing has changed.
    """
    # A signal would leave half of what follows, and the command would say that nothing changed.
    ignore_stop_signals((signal.SIGINT, signal.SIGTERM))
    # First: if this is killed before the merge, the next update merges.
    git(base.root, "update-ref", f"refs/heads/{BRANCH}", commit)
    words = ["merge", "--no-ff", "--no-edit", "--stat", "-m", title, commit]
    done = run_git(base.root, *user_of(base.root), *words)
    if done.returncode and run_git(base.root, "rev-parse", "--verify", "MERGE_HEAD").returncode:
        git(base.root, "update-ref", f"refs/heads/{BRANCH}", base.commit)
        said = " ".join(done.stderr.split()) or done.stdout.strip()
        raise ConfigError(f"git merge failed: {said}")
    print(done.stdout.strip())
    if done.returncode:
        print("resolve the conflicts, git add or git rm each file, then: git commit")
        print("or undo all: git merge --abort")
    return int(done.returncode != 0)
