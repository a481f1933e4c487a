"""python -m dist_amp.update [--dry_run]: bring a project made by `dist_amp new` to this version.

What this version makes with the project's choices is committed on its branch `dist_amp`, and merged
into the current branch. Your edits stay; where both changed the same lines, git reports a conflict.
--dry_run shows what would change, and the changelog of the features that the project has.
"""

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

import dist_amp
from dist_amp.commands.base import Base, commit_files, find_base, merge, preview, run_git
from dist_amp.commands.features import named, of_projects, read_table, with_needs
from dist_amp.commands.project import DEFAULT_TARGET, Plan, commit_of, fill, renamed
from dist_amp.errors import ConfigError
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.update", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="show what would change, and end")
    options = parser.parse_args(argv)
    root = shipped_folder()
    table = of_projects(root)
    base = find_base(Path(), may_have_changes=options.dry_run)
    check_not_newer(base, root)
    features = with_needs(named(base.record["features"], table), table)
    if base.version != this_version(root):
        print(f"dist_amp {base.version} -> {this_version(root)}")
    if options.dry_run:
        print(*changes(base, features, root), sep="\n")
    return rebase(base, tuple(name for name in table if name in features), root, **vars(options))


def rebase(base: Base, features: tuple[str, ...], root: Path, dry_run: bool = False) -> int:
    """Make the base anew with these features, and merge it; returns the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        plan = Plan(base.name, features, kept_task(base, Path(temporary)))
        folder = Path(temporary, base.name)
        fill(folder, plan, root)
        commit = commit_files(base, folder, features)
    if run_git(base.root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0:
        print("nothing to do")
        return 0
    if dry_run:
        return preview(base, commit)
    return merge(base, commit, f"Merge dist_amp {this_version(root)}")


def kept_task(base: Base, folder: Path) -> tuple[Path, str] | None:
    """The task that the base was made with, its file in `folder`; None for the package's own."""
    target = base.record["task"]
    if target == renamed(DEFAULT_TARGET, base.name) and "sources" in base.record["features"]:
        return None
    module, _, name = target.partition(":")
    file = Path(*module.split(".")).with_suffix(".py")
    path = folder / file.name
    # As it was made, also the example: it may be the user's by now.
    done = run_git(base.root, "show", f"{base.commit}:{file}")
    path.write_text(done.stdout, encoding="utf-8")
    return path, name


# --- versions


def this_version(root: Path) -> str:
    return f"{dist_amp.__version__} ({commit_of(root)[:7] or 'no commit'})"


def check_not_newer(base: Base, root: Path) -> None:
    """Errors: ConfigError for a project that a newer version made, or one that is not known."""
    commit = base.record["commit"]
    is_known = Version(base.record["version"]) <= Version(dist_amp.__version__)
    if commit and (root / ".git").exists():
        is_known = run_git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode == 0
    if not is_known:
        raise ConfigError(
            f"{base.root} was made by dist_amp {base.version}, which is newer than this one, "
            f"{this_version(root)}, or not in its history; update dist_amp first"
        )


def changes(base: Base, features: Sequence[str], root: Path) -> Iterator[str]:
    """The changelog's new entries, without those about a clone or features that are not there."""
    before = ""
    if base.record["commit"] and (root / ".git").exists():
        before = run_git(root, "show", f"{base.record['commit']}:CHANGELOG.md").stdout
    known = entries_of(before)
    missing = []
    for name, row in read_table(root).items():
        if name not in features:
            missing += [name, *row.get("settings", ()), *row.get("methods", ())]
        if name not in features and "clone" not in row:
            missing += re.findall(r"commands/(\w+)\.py", str(row["files"]))
    # An entry is about the first feature, command, method or setting that it names.
    about = re.compile(rf"`(python -m )?(dist_amp[ .])?(?:({'|'.join(missing)})\b|\w+\.\w)")
    for entry in entries_of((root / "CHANGELOG.md").read_text(encoding="utf-8")):
        first = about.search(entry)
        is_missing = first is not None and first[3] is not None
        if entry not in known and not is_missing and "In a clone" not in entry:
            yield entry


def entries_of(changelog: str) -> list[str]:
    return [entry.strip() for entry in re.findall(r"^- .*(?:\n .*)*", changelog, re.MULTILINE)]


if __name__ == "__main__":
    sys.exit(main())
