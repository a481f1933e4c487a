"""What the commands beside the main job share: how options are read, and how a command ends."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dist_amp.errors import ConfigError, Failure
from dist_amp.supervise.failure import report_failure


class Parser(argparse.ArgumentParser):
    """For a command that is described by its file's docstring. Errors: ConfigError for a mistake on its line."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def exit_status(run: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    """Run a command with its words, by default the command line's; what it returns, or its Failure's, reported."""
    try:
        return run(sys.argv[1:] if argv is None else argv) or 0
    except Failure as error:
        return report_failure(error, None)[0]
    except SystemExit as reported:  # argparse, after --help
        return int(reported.code or 0)
