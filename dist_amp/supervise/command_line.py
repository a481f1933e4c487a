"""Option parsing and error reporting of the commands other than train."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dist_amp.distributed import signals
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import present

Main = Callable[[Sequence[str]], int | None]  # a command: arguments -> exit status; None means 0


def run_folder(text: str) -> Path:
    """The local folder that an argument names. Raises ConfigError for an address."""
    if "://" in text:
        raise ConfigError(
            f"{text} is an address, and this needs a folder on a disk; a run at an address prints "
            "its local folder in its first lines"
        )
    return Path(text).expanduser()


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError for a bad command line."""

    def __init__(self, prog: str, description: str | None, epilog: str | None = None):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
        )

    def add_argument(self, *names: str, **options: Any) -> Any:
        """Add an argument; on a command line, options may have hyphens in place of underscores.
        type=Path: a folder on a disk; for a positional argument, also the address of a run.
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


def command(when: str = "") -> Callable[[Main], Callable[..., int]]:
    """Decorator: a call of the command goes through `exit_status`, which also gets `when`."""
    return lambda main: partial(exit_status, main, when=when)


def exit_status(main: Main, argv: Sequence[str] | None = None, when: str = "") -> int:
    """Call main(argv), by default with sys.argv; report a Failure; return the exit status.

    when: appended to the line "stopped by SIGINT"; if it is set, SIGTERM is caught as well.
    """
    caught = (signal.SIGINT, signal.SIGTERM) if when else ()
    with signals.handle_signals(signals.raise_interrupt, caught):
        signals.after_imports()
        try:
            with signals.quiet_on_closed_pipe():
                return main(sys.argv[1:] if argv is None else argv) or 0
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
        except SystemExit as reported:  # by argparse after --help, or because of a closed pipe
            return int(reported.code or 0)
