"""Shared by the commands other than train: option parsing, and error reporting."""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dist_amp.distributed import signals
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import present

Run = Callable[[Sequence[str]], int | None]


def run_folder(text: str) -> Path:
    """The local folder that a command line names. Errors: ConfigError for an address."""
    if "://" in text:
        raise ConfigError(
            f"{text} is an address, and this needs a folder on a disk; give one (the first lines "
            "of a run at an address name its own)"
        )
    return Path(text).expanduser()


class Parser(argparse.ArgumentParser):
    """A command's parser. Errors: ConfigError for a bad command line."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
        )

    def add_argument(self, *names: str, **options: Any) -> Any:
        """An option's name may have hyphens in place of underscores. type=Path: a run's folder,
        which may be at an address, or for an option a path on a disk.
        """
        if options.get("type") is Path:
            options["type"] = run_folder
            if present("storage") and not names[0].startswith("-"):
                from dist_amp.storage.mirror import fetched

                options["type"] = fetched
        hyphened = [name.replace("_", "-") for name in names if name.startswith("--")]
        return super().add_argument(*dict.fromkeys([*names, *hyphened]), **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def command(when: str = "") -> Callable[[Run], Callable[..., int]]:
    """Decorates a function of the command line's words: see `exit_status`, whose `when` this is."""
    return lambda run: partial(exit_status, run, when=when)


def exit_status(run: Run, argv: Sequence[str] | None = None, when: str = "") -> int:
    """Call run(argv), by default the command line's; report a Failure; return the exit status.

    when: the end of the line that says that a signal stopped it; with one, SIGTERM does too.
    """
    with signals.raise_on_signals() if when else nullcontext():
        signals.after_imports()
        try:
            with signals.quiet_on_closed_pipe():
                return run(sys.argv[1:] if argv is None else argv) or 0
        except (Failure, ModuleNotFoundError) as error:
            from dist_amp.supervise.failure import as_failure, report_failure  # imports torch

            failure = as_failure(error)
            if not isinstance(failure, Failure):
                raise
            return report_failure(failure, None)[0]
        except KeyboardInterrupt as stopped:
            name = str(stopped) or "SIGINT"
            print(f"error: stopped by {name}{when}", file=sys.stderr, flush=True)
            return 1
        except SystemExit as reported:  # argparse, after --help; a closed pipe
            return int(reported.code or 0)
