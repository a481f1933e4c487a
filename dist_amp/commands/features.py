"""The optional features: the table in features.toml, and choosing from it."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import dist_amp
from dist_amp.errors import ConfigError, nearest_name

Table = dict[str, dict[str, Any]]  # {feature: its row}


def package_of(root: Path) -> Path:
    """The package beside the table, or the installed one."""
    package = root / "dist_amp"
    if package.is_dir():
        return package
    return Path(dist_amp.__file__).parent


def read_table(root: Path) -> Table:
    """root: the clone, or what dist_amp.files.shipped_folder() gives."""
    table = tomllib.loads((root / "features.toml").read_text(encoding="utf-8"))
    table.pop("tests", None)  # not a feature: what each test file of a project needs
    return table


def of_projects(root: Path) -> Table:
    """Without those that only the repository itself can have."""
    return {name: row for name, row in read_table(root).items() if not row.get("clone")}


def with_dependents(names: Iterable[str], table: Table) -> list[str]:
    """The features and those that are built on them."""
    return sorted(name for name in table if not {*names}.isdisjoint(with_needs([name], table)))


def with_needs(names: Iterable[str], table: Table) -> list[str]:
    """The features and those that they are built on."""
    chosen = set(names)
    before: set[str] = set()
    while chosen != before:
        before = set(chosen)
        for name in before:
            chosen.update(table[name].get("needs", ()))
    return sorted(chosen)


def list_of(table: Table) -> str:
    """The features, one line each."""
    width = max(map(len, table))
    return "\n".join(f"  {name:<{width}}  {row['about']}" for name, row in table.items())


def named(lists: Iterable[str], table: Table) -> list[str]:
    """The features in comma-separated lists. Errors: ConfigError for one that does not exist."""
    names_of = {name: name for name in (*table, "all")}
    for name, row in table.items():
        for alias in row.get("also", ()):
            names_of[alias] = name
    found = []
    for word in ",".join(lists).split(","):
        word = word.strip()
        if word and word not in names_of:
            hint = "dist_amp new --help lists them"
            if near := nearest_name(word, names_of):
                hint = f"did you mean {near}?"
            raise ConfigError(f"there is no feature {word}; {hint}")
        if word and names_of[word] not in found:
            found.append(names_of[word])
    return found


def choose(
    table: Table, present: Sequence[str], wanted: Sequence[str], left_out: Sequence[str], yes: bool
) -> tuple[str, ...]:
    """`present` and `wanted` with what they need, less `left_out` and what is built on it.

    In the table's order. Says what comes or goes besides; without `yes` that is an error.
    Errors: ConfigError.
    """
    gone = with_dependents(left_out, table)
    if "all" in wanted:
        wanted = [name for name in table if name not in gone]
        yes = True
    for name in wanted:
        needs = with_needs([name], table)
        missing = [other for other in left_out if other in needs]
        if name in missing:
            raise ConfigError(f"{name} is both asked for and left out; drop one of the two")
        if missing:
            raise ConfigError(f"{name} needs {', '.join(missing)}, to be left out; drop one")
    before = [*present, *wanted]
    chosen = [name for name in with_needs(before, table) if name not in gone]
    added = [name for name in chosen if name not in before]
    removed = [name for name in gone if name in before and name not in left_out]
    said = []
    if added:
        asking = ", ".join(wanted or before)
        said.append(f"{asking} needs {', '.join(added)}")
    if removed:
        said.append(f"{', '.join(removed)} needs {', '.join(left_out)}, and is left out too")
    if said and not yes:
        raise ConfigError(f"{'; '.join(said)}: name them too, or give --yes")
    for line in said:
        print(line)
    return tuple(name for name in table if name in chosen)
