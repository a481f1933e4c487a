"""python -m dist_amp.adopt [FEATURE ...] [--remove FEATURE,...] [--yes]

Add optional features to a project made by `dist_amp new`, or remove them, in the project's folder:
by a merge, as `dist_amp update` does, so that your edits stay.

    dist_amp adopt ema slurm
    dist_amp adopt --remove diff
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.commands.base import find_base
from dist_amp.commands.features import choose, list_of, named, of_projects
from dist_amp.commands.update import rebase, this_version
from dist_amp.distributed.signals import raise_on_signals
from dist_amp.errors import ConfigError
from dist_amp.files import shipped_folder
from dist_amp.supervise.command_line import Parser, exit_status


def main(argv: Sequence[str] | None = None) -> int:
    with raise_on_signals():
        return exit_status(run, argv, "; the project is as it was")


def run(argv: Sequence[str]) -> int:
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
    features = choose(table, base.record["features"], wanted, removed, options.yes)
    print(f"features: {', '.join(features) or 'none'}")
    return rebase(base, features, root)


if __name__ == "__main__":
    sys.exit(main())
