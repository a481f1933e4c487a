"""The doctor on two ranks."""

import re
import socket

from forked import finish
from test_doctor import alone  # noqa: F401


def test_two_ranks_are_started_and_rank_0_prints(launch):
    """With the variables that every launcher sets. One has been restarted: in an elastic run each
    machine counts its own restarts, and the ranks must meet all the same.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "module": "dist_amp.doctor"}
    started = [
        launch.start(0, RANK=rank, LOCAL_RANK=rank, TORCHELASTIC_RESTART_COUNT=rank, **place)
        for rank in "01"
    ]
    first, second = [finish(process, 120) for process in started]
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    for text in (
        "all-reduce .* GB/s bus bandwidth with 4 MiB; ",
        "links in a machine",
        "matmul",
    ):
        assert re.search(f"^(ok  |warn)  {text}", first.stdout, re.M), first.stdout
