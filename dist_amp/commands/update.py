"""python -m dist_amp.update [--dry_run] [--from PATH_OR_URL]: bring a project made by `dist_amp new`
to the newest version of the clone that it was made from.

What that version makes with the project's choices is committed on its branch `dist_amp`, and merged
into the current branch. Your edits stay; where both changed the same lines, git reports a conflict.
--dry_run shows what would change, and the new lines of the changelog.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.commands.base import find_base, rebase
from dist_amp.supervise.command_line import Parser, command


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.update", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="show what would change, and end")
    parser.add_argument(
        "--from", dest="source", default="", metavar="PATH_OR_URL", help="where dist_amp's files are"
    )
    options = parser.parse_args(argv)
    base = find_base(Path(), may_have_changes=options.dry_run)
    return rebase(base, options.source or base.record["source"], dry_run=options.dry_run)


if __name__ == "__main__":
    sys.exit(main())
