"""python -m dist_amp.update: update a project to the newest version of its source.

Run it in the project's folder. The source is the folder or address of a clone of dist_amp: `source`
under [tool.dist_amp] in pyproject.toml. Its newest version generates the project again, with the
same features, commits that on the branch `dist_amp`, and merges it into the current branch. Your
edits stay; where you and the new version changed the same lines, git reports a conflict.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from dist_amp.errors import ConfigError
from dist_amp.supervise.command_line import Parser, command

BRANCH = "dist_amp"  # the project as `dist_amp new` generated it, without the user's edits


@command("; git status shows what is left to do")
def main(argv: Sequence[str]) -> int:
    Parser("python -m dist_amp.update", __doc__).parse_args(argv)
    return regenerate(*find_project())


def git(folder: Path, *words: str, ok: Sequence[int] = (0,)) -> str:
    """The output of a git command. Raises ConfigError with git's message."""
    # In a git hook, these variables point to another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options: dict[str, Any] = {"capture_output": True, "text": True}
    try:
        done = subprocess.run(["git", *words], cwd=folder, env=environ, **options)
    except FileNotFoundError:
        raise ConfigError("git is missing, and a project is a git repository; install it") from None
    if done.returncode not in ok:
        raise ConfigError(f"git failed: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout.strip()


def user_of(folder: Path) -> list[str]:
    """Options that name a committer, if git has none configured."""
    if git(folder, "config", "--default=", "user.email"):
        return []
    return ["-c", "user.name=dist_amp", "-c", "user.email=dist_amp@localhost"]


def find_project() -> tuple[Path, dict[str, Any]]:
    """Returns (the project's folder, its name and [tool.dist_amp] of its pyproject.toml).

    Raises ConfigError outside of a project.
    """
    try:
        root = Path(git(Path(), "rev-parse", "--show-toplevel"))
        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        record = {"name": settings["project"]["name"], **settings["tool"]["dist_amp"]}
        git(root, "rev-parse", "--verify", f"refs/heads/{BRANCH}")
    except (ConfigError, OSError, KeyError) as error:
        raise ConfigError(
            f"this is not a project made by `dist_amp new`, with its branch {BRANCH}: {error}; "
            f"go to its folder, or fetch the branch: git fetch origin {BRANCH}:{BRANCH}"
        ) from None
    return root, record


def regenerate(
    root: Path, record: dict[str, Any], commit: str = "", added: str = "", removed: str = ""
) -> int:
    """Generate the project again, with other features; merge it. Returns 1 on conflicts.

    commit: of the source to use; "": the newest. added, removed: features, separated by commas.
    """
    name = record["name"]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(record["source"])
        if commit or not source.is_dir():
            source = Path(temporary, "source")
            try:
                git(root, "clone", "--quiet", record["source"], str(source))
                git(source, "checkout", "--quiet", commit or "HEAD")
            except ConfigError as error:
                hint = "name another `source` under [tool.dist_amp] in pyproject.toml"
                raise ConfigError(f"{error}; {hint}") from None
        # The task as first generated: a merge would take the user's edits of it for the source's.
        made = Path(temporary, "made")
        made.mkdir()
        git(root, f"--work-tree={made}", "restore", f"--source={BRANCH}", "--", f"{name}/task.py")
        words = ["--like", f"{root}/pyproject.toml", "--with", added, "--without", removed]
        words += ["--task", f"{made}/{name}/task.py:{record['task']}"]
        run_new(source, Path(temporary), name, *words)
        git(root, "fetch", "--quiet", f"{temporary}/{name}", "main")
    new = tomllib.loads(git(root, "show", "FETCH_HEAD:pyproject.toml"))["tool"]["dist_amp"]
    if Version(new["version"]) < Version(record["version"]):
        raise ConfigError(
            f"{record['source']} has version {new['version']}, and the project was made from "
            f"{record['version']}; bring the source to that version or a newer one"
        )
    title = f"dist_amp {new['version']} with {', '.join(new['features'])}"
    # The branch comes first: if git refuses the merge, the next update merges it.
    if git(root, "diff", "--name-only", BRANCH, "FETCH_HEAD", "--"):
        tree = ("FETCH_HEAD^{tree}", "-p", BRANCH, "-m", title)
        new_commit = git(root, *user_of(root), "commit-tree", *tree)
        git(root, "branch", "--force", BRANCH, new_commit)
    words = ["merge", "--no-ff", "--stat", "-m", f"Merge {title}", BRANCH]
    print(git(root, *user_of(root), *words, ok=(0, 1)))
    if conflicts := git(root, "ls-files", "--unmerged"):
        print("resolve the conflicts, git add or git rm each file, then: git commit")
        print("or undo all: git merge --abort")
    return int(bool(conflicts))


def run_new(source: Path, folder: Path, *words: str) -> None:
    environ = os.environ | {"PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "dist_amp.new", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise ConfigError(f"source {source}: {reason.removeprefix('error: ')}")


if __name__ == "__main__":
    sys.exit(main())
