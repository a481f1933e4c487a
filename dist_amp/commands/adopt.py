"""python -m dist_amp.adopt [FEATURE ...] [--remove FEATURE,...] [--from PATH_OR_URL]

Add optional features to a project made by `dist_amp new`, or remove them, in the project's folder:
by a merge, as `dist_amp update` does, so that your edits stay.

    dist_amp adopt ema slurm
    dist_amp adopt --remove diff
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.commands.base import BRANCH, add_source, find_base, rebase
from dist_amp.errors import ConfigError
from dist_amp.supervise.command_line import Parser, command


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.adopt", __doc__)
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="to add")
    parser.add_argument(
        "--remove", action="append", default=[], metavar="FEATURE,...", help="to remove"
    )
    add_source(parser)
    options = parser.parse_args(argv)
    added = [name for name in ",".join(options.features).split(",") if name]
    removed = [name for name in ",".join(options.remove).split(",") if name]
    base = find_base(Path())
    has = base.record["features"]
    if not added and not removed:
        raise ConfigError(f"adopt: name a feature to add, or to --remove; it has {', '.join(has)}")
    for name in added:
        if name in has:
            raise ConfigError(
                f"adopt {name}: the project has it already; leave it out, or bring back a file "
                f"that you deleted: git checkout {BRANCH} -- FILE"
            )
    for name in removed:
        if name not in has:
            raise ConfigError(
                f"adopt --remove {name}: the project does not have it; it has {', '.join(has)}"
            )
    source = options.source or base.record["source"]
    return rebase(base, source, base.record["commit"], added, removed)


if __name__ == "__main__":
    sys.exit(main())
