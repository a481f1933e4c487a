"""What test_doctor.py tests, with other features."""

import json
import socket

from forked import Forked, finish
from test_doctor import alone  # noqa: F401


def test_two_ranks_are_started_and_rank_0_prints(launch, tmp_path):
    """As torchrun does, with the variables that every launcher sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    ranks = []
    for rank in ("0", "1"):
        place = {"MASTER_ADDR": "127.0.0.1", "RANK": rank, "LOCAL_RANK": rank}
        ranks.append(Forked(["--json"], tmp_path, launch.environ(world | place), "dist_amp.doctor"))
    first, second = (finish(rank, 300) for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    found = json.loads(first.stdout)
    assert found["ranks"] == 2
    lines = {check["name"]: check["found"] for check in found["checks"]}
    assert lines["same code"] == "2 ranks have the same code and versions"
    assert " GB/s bus bandwidth with 4 MiB; " in lines["all-reduce"]
    assert {"links in a machine", "matmul"} <= lines.keys(), found
