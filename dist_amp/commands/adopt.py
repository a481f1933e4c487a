"""python -m dist_amp.adopt [FEATURE ...] [--remove FEATURE,...] [--yes]

Add optional features to a project made by `dist_amp new`, or remove them, in the project's folder:
by a merge, as `dist_amp update` does, so that your edits stay.

    dist_amp adopt ema slurm
    dist_amp adopt --remove diff
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.commands.base import find_base, git
from dist_amp.commands.features import Table, choose, list_of, named, of_projects
from dist_amp.commands.update import rebase, this_version
from dist_amp.config.load import from_file
from dist_amp.distributed.process import warn
from dist_amp.errors import ConfigError
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, command


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    root = shipped_folder()
    table = of_projects(root)
    parser = Parser("python -m dist_amp.adopt", __doc__, f"features:\n{list_of(table)}")
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="to add")
    parser.add_argument(
        "--remove", action="append", default=[], metavar="FEATURE,...", help="to remove"
    )
    parser.add_argument("--yes", action="store_true", help="add or remove what these need too")
    options = parser.parse_args(argv)
    wanted = named(options.features, table)
    removed = named(options.remove, table)
    if not wanted and not removed:
        raise ConfigError("adopt: name a feature to add, or one to --remove; --help lists them")
    base = find_base(Path())
    if base.version != this_version(root):
        raise ConfigError(
            f"{base.root} was made by dist_amp {base.version}, and this is {this_version(root)}; "
            "run `dist_amp update` first"
        )
    present = base.record["features"]
    features = choose(table, present, wanted, removed, options.yes)
    for name in set(wanted) & set(present):
        print(f"{name} is in the project already")
    for name in set(removed) - set(present):
        print(f"{name} is not in the project")
    status = rebase(base, features, root)
    if added := [name for name in features if name not in present]:
        print(f"added {', '.join(added)}")
    if gone := [name for name in present if name not in features]:
        print(f"removed {', '.join(gone)}")
    warn_of_settings({name: table[name] for name in gone})
    return status


def warn_of_settings(removed: Table) -> None:
    """Warn of settings of removed features in configs of the user's: a run would refuse them."""
    for file in git(Path(), "ls-files", ":/*.toml").splitlines():
        try:
            settings = from_file(file)
        except ConfigError:  # it has conflicts
            continue
        for key, given in settings.items():
            for name, row in removed.items():
                is_gone = (key, *given.words) == ("optim.name", name)
                for setting in row.get("settings", ()):
                    is_gone = is_gone or f"{key}.".startswith(f"{setting}.")
                if is_gone:
                    warn(f"{key} {given.source}, was of the feature {name}: remove it")


if __name__ == "__main__":
    sys.exit(main())
