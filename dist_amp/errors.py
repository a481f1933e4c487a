"""The errors that end a run, their exit statuses, and text without secrets."""

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

MASK = "***"
# user:password@ in a URL. The password may contain slashes; host:80/a@b is not a login.
LOGIN = re.compile(r"(?<=//)(?:[^/\s\"']+|[^/\s\"':@]+:(?!:|\d*[/?#])[^\s\"'@]+)@")
# Parameters of signed URLs, such as X-Amz-Signature= and sig=.
QUERY = re.compile(
    r"(?i)(?<=[?&;])([\w.-]*(?:sig|signature|credential|token|secret|passw\w*|pwd|key|keyid|auth|"
    r"policy))=[^&\s\"'#]+"
)
# Names of settings and variables that hold secrets; pad_token is not one.
SECRET = (
    r"token|(?:\w*[_-])?(?:password|passwd|pwd|passphrase|secret|credentials?|api_?key|"
    r"(?:access|account|private|secret)_?key|(?:access|api|auth|hf|sas|session)[_-]token)"
)
# Secrets in TOML, code and storage options, such as 'secret': 'abc' and password = "abc".
QUOTED = re.compile(rf"(?i)(?<!\w)((?:{SECRET})(?:['\"]\s*:|\s*=)\s*)(['\"])(?:\\.|(?!\2)[^\\])+\2")

SAVED_AND_STOPPED = 75  # exit status: stopped by a signal and saved; restart it (EX_TEMPFAIL)


class Failure(Exception):
    """An error that the user can fix: one line with the value, the rule and the fix, no secrets."""

    exit_code = 1

    def __init__(self, text: str = ""):
        super().__init__(masked(text))


class Transient(Failure):
    """A rank is dead, hangs or can't be reached; a restart may succeed."""


class ConfigError(Failure):
    exit_code = 64


class DataError(Failure):
    """The data, a task's method or a checkpoint is wrong."""

    exit_code = 65


class NumericsError(Failure):
    """Training can't continue: values are not finite, or differ between ranks."""

    exit_code = 70


class CheckpointRejected(Exception):
    """A checkpoint can't be loaded. Not a Failure: the run may have another, valid checkpoint."""


def masked(text: str) -> str:
    """The text with passwords and signatures in URLs, and quoted secrets, masked."""
    text = QUERY.sub(rf"\1={MASK}", LOGIN.sub(f"{MASK}@", text))
    return QUOTED.sub(rf"\1\2{MASK}\2", text)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def in_one_line(error: BaseException) -> str:
    """The error's type, first line, file and line, outside installed packages if possible."""
    places = list(traceback.extract_tb(error.__traceback__))
    outside = outside_packages(error)
    # Leave out frames of a dispatch mode: every operation passes through it, so it is no cause.
    places = [place for place in outside if place.name != "__torch_dispatch__"] or places
    where = f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""
    return masked(f"{type(error).__name__}: {first_line(error)}{where}")


def outside_packages(error: BaseException) -> list[traceback.FrameSummary]:
    """The error's frames outside installed packages and torch.compile's generated code."""
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "-packages")
    outside = []
    for place in traceback.extract_tb(error.__traceback__):
        if "-packages" not in place.filename and compiled not in place.filename:
            outside.append(place)
    return outside


def some_of(texts: Sequence[str], most: int = 3) -> str:
    """The first few texts, and how many more there are: "a, b, c and 4 more"."""
    shown = ", ".join(texts[:most])
    if len(texts) > most:
        shown += f" and {len(texts) - most} more"
    return shown


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name most similar to `name`; "" if none has a similarity of `cutoff` or more."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table; the first `left` columns are left-aligned, the rest right-aligned."""
    aligned = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.ljust if number < left else str.rjust
        aligned.append([align(cell, width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
