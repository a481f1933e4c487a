"""One live run per folder, no orphans, enough disk, equal ranks, and the name of a dead rank."""

import errno
import os
import platform
import re
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from chaos import children, is_there
from messages import message_of
from test_train import TINY, wait_for
from tiny import Tiny, make_run, save, take_steps

from dist_amp.config.load import load_config
from dist_amp.files import write_durably
from dist_amp.supervise import preflight as guards
from dist_amp.supervise.preflight import check_free_space, check_launch, make_folder, only_live_run
from dist_amp.world import World


@pytest.mark.bad_input("run folder in use by a live run")
def test_a_folder_of_a_live_run_is_refused_with_its_process_and_one_of_an_ended_run_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(guards, "LOCK_SECONDS", 0.5)
    said = f"in use by a live run (process {os.getpid()} on {platform.node()}); stop that"
    for _ in range(2):
        with only_live_run(tmp_path, World()):
            assert said in message_of(1, only_live_run(tmp_path, World()).__enter__)


def test_loader_workers_die_with_their_rank_however_it_dies(launch, tmp_path):
    """They hold its sockets: while one lives, the other ranks can't know that theirs is dead."""
    # torch's own check for the parent, every five seconds, must not be what ends them.
    (tmp_path / "unchecked.py").write_text(
        "from tiny import Slow\nfrom torch.utils.data._utils import worker\n\n"
        "worker.MP_STATUS_CHECK_INTERVAL = 3600.0\n"
    )
    words = [*TINY, "--task.target", "unchecked:Slow", "--train.steps", "600"]
    run = launch.start(0, *words, "--data.workers", "2", "--run.dir", "run")
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists(), "the first logged step")
    workers = children(run.pid)
    assert len(workers) == 2
    run.kill()
    run.wait(300)
    wait_for(lambda: not any(map(is_there, workers)), "the end of the workers")


@pytest.mark.bad_input("restarts requested with a rendezvous store that all attempts share")
def test_restarts_into_a_store_that_outlives_its_workers_are_refused_with_the_variable(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    said = message_of(64, check_launch)
    assert "max-restarts=3 would restart into a store" in said
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_launch()


@pytest.mark.bad_input("too little disk space for the coming checkpoints")
def test_a_disk_too_small_for_the_checkpoints_to_come_is_refused_with_both_sizes(
    tmp_path, monkeypatch
):
    run = make_run(World(), Tiny(), "--run.dir", tmp_path, "--checkpoint.every", 1)
    size = 3 * 4 * sum(p.numel() for p in run.model.parameters())
    disk = SimpleNamespace(free=4 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    check_free_space(run)
    disk.free -= 1
    said = r"has .* free, and its checkpoints need .*B? \(4 of .* at most, 0 exist\); free some"
    assert re.search(said, message_of(1, check_free_space, run))
    take_steps(run, 1)
    save(run)
    check_free_space(run)  # one of the four exists


def test_a_durable_write_replaces_a_file_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    for text in ("old", "new"):
        write_durably(path, text)
        assert (path.read_text(), os.listdir(tmp_path)) == (text, ["summary.json"])
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "newer")
    assert path.read_text() == "new"


@pytest.mark.bad_input("a run.dir on a disk that not all ranks share")
def test_a_run_folder_that_a_rank_does_not_see_is_refused_with_its_host(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "appears", partial(guards.appears, seconds=0))
    config = load_config(["--run.dir", str(tmp_path / "run")], {})
    said = f"run does not exist on {platform.node()}: put it on a disk that all ranks share"
    assert said in message_of(1, make_folder, tmp_path / "run", config, World(rank=1))
