"""The doctor on two ranks."""

import json

from test_doctor import alone  # noqa: F401


def test_two_ranks_are_started_and_rank_0_prints(launch):
    """As torchrun does, with the variables that every launcher sets."""
    first, second = launch.each(2, "--json", module="dist_amp.doctor")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert found["ranks"] == 2
    lines = {check["name"]: check["found"] for check in found["checks"]}
    assert lines["same code"] == "2 ranks have the same code and versions"
    assert " GB/s bus bandwidth with 4 MiB; " in lines["all-reduce"]
    assert {"links in a machine", "matmul"} <= lines.keys(), found
