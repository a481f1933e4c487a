"""The errors that end a run, their exit statuses, and how any error is told in one line."""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class Failure(Exception):
    """Something the user can mend: one line that names the value, the rule and the mend."""

    exit_code = 1


class ConfigError(Failure):
    exit_code = 64


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, or an empty string."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


SAVED_AND_STOPPED = 75  # exit status: stopped by a signal, saved, may be started again (EX_TEMPFAIL)


class DataError(Failure):
    """The data, the task's use of them, or a checkpoint is not what it must be."""

    exit_code = 65


class NumericsError(Failure):
    """Training can't go on: its numbers are not finite, or not the same on all ranks."""

    exit_code = 70


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """The error's type, its first line, and where it was raised."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
