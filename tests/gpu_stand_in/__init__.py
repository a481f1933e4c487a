"""Run code on GPUs that are not there: fake_gpu.c says what that shows, and what
it can't.

    result = on_fake_gpus(8, my_function, argument)    # my_function(argument), in a fresh process

The function must be importable. DIST_AMP_FAKE_GPU=1 bash tests/engines.sh installs what it takes.
"""

import atexit
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dist_amp.errors import ConfigError
from gpu_stand_in.stand_in import StandIn, environment, find_stand_in

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
ROOT = TESTS.parent
STAND_IN = StandIn("", Path(), "")
missing = ""
try:
    STAND_IN = find_stand_in()
except ConfigError as error:
    missing = str(error)
PYTHON = STAND_IN.python

needs_fake_gpus = pytest.mark.skipif(bool(missing), reason=missing)


@cache
def library() -> Path:
    """The library, compiled once in this process."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return STAND_IN.build(Path(folder.name))


def environ(gpus: int, values: bool = False, **more: str) -> dict[str, str]:
    """The variables of a process that sees so many GPUs. values: copied values can be read back."""
    # Models come from folders; the hub is not asked for more.
    more = {"PYTHONPATH": f"{ROOT}:{TESTS}", "HF_HUB_OFFLINE": "1", **more}
    return environment(library(), gpus, values) | more


def on_fake_gpus(
    gpus: int,
    function: Callable[..., Any],
    *args: Any,
    values: bool = False,
    timeout: float = 300,
    **more: str,
) -> Any:
    """What function(*args) returns there; AssertionError with its output if it raises."""
    try:
        return STAND_IN.call(environ(gpus, values, **more), function, *args, timeout=timeout)
    except subprocess.CalledProcessError as error:
        said = f"{error.stdout}\n{error.stderr}"
        raise AssertionError(
            f"{function.__name__}: exit status {error.returncode}\n{said}"
        ) from None
