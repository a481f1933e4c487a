"""What test_watchdog.py tests, with other features."""

import resource

import pytest
from forked import context

from dist_amp.distributed.rendezvous import raise_open_files
from dist_amp.errors import ConfigError


def refusal(pipe, ranks):
    """What is said under a limit of 1,024, and the limit afterwards; a process can't undo it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
    said = ""
    try:
        raise_open_files(ranks)
    except ConfigError as error:
        said = str(error)
    pipe.send((said, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


@pytest.mark.bad_input("a hard limit of open files below what so many ranks need")
@pytest.mark.parametrize(("ranks", "refused"), [(236, ""), (1024, "1024 ranks need 3581 sockets")])
def test_a_limit_of_open_files_is_raised_and_refused_where_so_many_ranks_need_more(ranks, refused):
    here, there = context.Pipe()
    child = context.Process(target=refusal, args=(there, ranks))
    child.start()
    said, limit = here.recv()
    child.join()
    assert limit == 1024
    assert said.startswith(refused)
    assert ("raise it: ulimit -Hn 3781" in said) == bool(refused)
