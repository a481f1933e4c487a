"""python -m dist_amp.update [--dry_run] [--from PATH_OR_URL]: bring a project that `dist_amp new`
made to the newest version of its source.

What that version makes with the project's choices is committed on its branch `dist_amp`, and merged
into the current branch. Your edits stay; where both changed the same lines, git reports a conflict.
--dry_run shows what would change, and the new lines of the changelog.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from dist_amp.commands.base import add_source, find_base, rebase
from dist_amp.supervise.command_line import Parser, command


@command("; the project is as it was")
def main(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.update", __doc__)
    parser.add_argument("--dry_run", action="store_true", help="show what would change, and end")
    add_source(parser)
    options = parser.parse_args(argv)
    base = find_base(Path(), may_have_changes=options.dry_run)
    return rebase(base, options.source or base.record["source"], dry_run=options.dry_run)


if __name__ == "__main__":
    sys.exit(main())
