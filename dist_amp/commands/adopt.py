"""python -m dist_amp.adopt [FEATURE ...] [--remove FEATURE,...]

Add optional features to a project made by `dist_amp new`, or remove them: `dist_amp new --help` has
a list. Run it in the project's folder. Like `dist_amp update`, it merges with git: your edits stay.

    dist_amp adopt ema slurm
    dist_amp adopt --remove diff
"""

import sys
from collections.abc import Sequence

from dist_amp.commands.update import BRANCH, find_project, regenerate
from dist_amp.errors import ConfigError
from dist_amp.supervise.command_line import Parser, command


@command("; git status shows what is left to do")
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.adopt", __doc__)
    parser.add_argument("features", nargs="*", metavar="FEATURE", help="feature to add")
    parser.add_argument("--remove", action="append", default=[], metavar="FEATURE,...")
    options = parser.parse_args(argv)
    if not (options.features or options.remove):
        parser.error("give a feature to add, or --remove FEATURE")
    root, record = find_project()
    added, removed = ",".join(options.features), ",".join(options.remove)
    if present := [name for name in added.split(",") if name in record["features"]]:
        raise ConfigError(
            f"adopt {present[0]}: the project already has it; leave it out, or restore a file that "
            f"you deleted: git checkout {BRANCH} -- FILE"
        )
    return regenerate(root, record, record["commit"], added, removed)


if __name__ == "__main__":
    sys.exit(main())
