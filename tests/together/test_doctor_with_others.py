"""The doctor on two ranks."""

import re

from test_doctor import alone  # noqa: F401


def test_two_ranks_are_started_and_rank_0_prints(launch):
    """As torchrun does, with the variables that every launcher sets."""
    first, second = launch.each(2, module="dist_amp.doctor")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    for text in (
        "all-reduce .* GB/s bus bandwidth with 4 MiB; ",
        "links in a machine",
        "matmul",
    ):
        assert re.search(f"^(ok  |warn)  {text}", first.stdout, re.M), first.stdout
