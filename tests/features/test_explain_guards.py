"""Core as test_guards.py tests it, with explain."""

import errno
import os

import pytest

from dist_amp.errors import Failure
from dist_amp.supervise.explain import explain_disk


@pytest.mark.parametrize(
    ("number", "word"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only")]
)
def test_a_full_or_read_only_disk_is_one_line_with_the_path(tmp_path, number, word):
    error = explain_disk(OSError(number, os.strerror(number), "run/summary.json"), tmp_path)
    assert isinstance(error, Failure)
    assert f"run/summary.json can't be written ({word}" in str(error)
    other = OSError(errno.ENOENT, "no such file")
    assert explain_disk(other, tmp_path) is other
