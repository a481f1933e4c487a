"""One live run per folder, no orphans, enough disk, equal ranks, and the name of a dead rank."""

import errno
import os
import platform
import shutil
import signal
import sys
import time
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import forked
import pytest
import torch
from chaos import children, is_there
from conftest import needs
from ranks import on_ranks
from test_train import TINY, wait_for
from tiny import Tiny, make_run, save, take_steps

from dist_amp.checkpoint.compatibility import FREE_TO_CHANGE
from dist_amp.config.load import load_config
from dist_amp.config.text import to_toml
from dist_amp.errors import ConfigError, Failure
from dist_amp.files import write_durably
from dist_amp.supervise import preflight as guards
from dist_amp.supervise import stop as stops
from dist_amp.supervise.preflight import (
    check_free_space,
    check_launch,
    check_ranks_agree,
    make_folder,
    only_live_run,
)
from dist_amp.supervise.stop import AgreedStop
from dist_amp.world import World


def hold(folder, held):
    with only_live_run(folder, World()):
        held.send("held")
        time.sleep(3600)


@pytest.mark.bad_input("run folder in use by a live run")
def test_a_folder_of_a_live_run_is_refused_with_its_process_and_one_of_a_dead_run_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(guards, "LOCK_SECONDS", 0.5)
    here, there = forked.context.Pipe()
    holder = forked.context.Process(target=hold, args=(tmp_path, there))
    holder.start()
    assert here.recv() == "held"
    said = f"in use by a live run .process {holder.pid} on {platform.node()}.; stop that"
    with pytest.raises(Failure, match=said):
        only_live_run(tmp_path, World()).__enter__()
    holder.kill()
    holder.join()
    with only_live_run(tmp_path, World()):
        pass


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
    rule = "max-restarts=3 .* set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(ConfigError, match=rule) as error:
        check_launch()
    assert error.value.exit_code == 64
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_launch()


def difference_of_ranks(world, differs=None):
    """The error of check_ranks_agree if rank 1 differs; "" for none."""
    text = to_toml(load_config(["--task.target", "tiny:Tiny", "--data.path", "/disk"], environ={}))
    changes = {
        "a setting": {"lr = 0.0003": "lr = 0.001"},
        "per-machine settings": {"workers = 0": "workers = 2", '"/disk"': '"/scratch"'},
        "data": {'path = "/disk"': 'path = "off"'},
    }
    real = guards.code_hashes
    if world.rank == 1:
        for old, new in changes.get(differs, {}).items():
            text = text.replace(old, new)
    if world.rank == 1 and differs == "a file":
        changed = real("tiny:Tiny") | {"dist_amp/step.py": "0123abcd", "own.py": "89abcdef"}
        guards.code_hashes = lambda target: changed
    try:
        check_ranks_agree("tiny:Tiny", text, world)
    except ConfigError as error:
        return str(error)
    finally:
        guards.code_hashes = real
    return ""


@pytest.mark.parametrize("differs", [None, "per-machine settings"])
def test_ranks_that_agree_are_not_reported(differs):
    assert on_ranks(2, difference_of_ranks, differs) == ["", ""]


def test_per_machine_settings_do_not_change_the_results():
    assert all(name.startswith(FREE_TO_CHANGE) for name in guards.PER_MACHINE)


@pytest.mark.bad_input("nodes with different code, config or versions")
@pytest.mark.parametrize(
    ("differs", "what"),
    [
        ("data", "data.path is off, and given on rank 0"),
        ("a setting", "optim.lr is 0.001, and 0.0003 on rank 0"),
        (
            "a file",
            "dist_amp/step.py is 0123abcd, and MINE on rank 0; own.py is 89abcdef, and absent on "
            "rank 0",
        ),
    ],
)
def test_ranks_with_other_code_or_settings_get_each_difference_with_both_values(differs, what):
    mine = guards.code_hashes("tiny:Tiny")["dist_amp/step.py"]
    what = what.replace("MINE", mine)
    fix = "start all of them with the same code, versions and settings (environment, config files)"
    expected = f"the ranks differ: on rank 1 ({platform.node()}): {what}; {fix}"
    assert on_ranks(2, difference_of_ranks, differs) == [expected] * 2


def test_the_users_task_file_and_the_versions_are_compared():
    assert "tiny.py" in guards.code_hashes("tiny:Tiny")
    assert guards.versions() == {
        "python": "{}.{}".format(*sys.version_info),
        "torch": torch.__version__,
        "datasets": version("datasets"),
    }


@needs("tasks.causal_lm")
def test_a_task_of_the_package_is_compared_by_its_path():
    assert "causal_lm.py" not in guards.code_hashes("dist_amp.tasks.causal_lm:CausalLM")


def test_hidden_files_of_editors_and_notebooks_are_not_compared(tmp_path, monkeypatch):
    for name in ("step.py", ".step.py", "tasks/own.py", ".ipynb_checkpoints/step-checkpoint.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(guards, "__file__", str(tmp_path / "supervise" / "preflight.py"))
    expected = {"dist_amp/step.py", "dist_amp/tasks/own.py", "tiny.py"}
    assert set(guards.code_hashes("tiny:Tiny")) == expected


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
    with pytest.raises(Failure, match=said) as error:
        check_free_space(run)
    assert error.value.exit_code == 1
    take_steps(run, 1)
    save(run)
    check_free_space(run)  # one of the four exists


def test_a_durable_write_replaces_a_file_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_durably(path, "old")
    write_durably(path, "new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("new", ["summary.json"])

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "newer")
    assert path.read_text() == "new"


@pytest.mark.bad_input("a run.dir on a disk that not all ranks share")
def test_a_run_folder_that_a_rank_does_not_see_is_refused_with_its_host(tmp_path, monkeypatch):
    monkeypatch.setattr(guards, "appears", partial(guards.appears, seconds=0))
    config = load_config(["--run.dir", str(tmp_path / "run")], {})
    text = f"run is not there on {platform.node()}: put it on a disk that all ranks share"
    with pytest.raises(Failure, match=text):
        make_folder(tmp_path / "run", config, World(rank=1))


def test_a_second_ctrl_c_stops_at_once_and_one_that_the_launcher_forwards_does_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stops.time, "monotonic", lambda: now[0])
    with AgreedStop(World()) as stop:
        for seconds in (0.0, 0.5):
            now[0] += seconds
            signal.raise_signal(signal.SIGINT)
        assert stop.requested_by == "SIGINT"
        now[0] += 3.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("seconds", "polls"), [(1e-4, stops.MOST_POLLS_BETWEEN), (0.25, 4), (3.0, 1)]
)
def test_ranks_agree_on_a_stop_about_once_a_second_and_at_most_after_32_steps(
    monkeypatch, seconds, polls
):
    now, polled, exchanges = [100.0], [], []
    monkeypatch.setattr(stops.time, "monotonic", lambda: now[0])
    exchange = AgreedStop._start_exchange
    monkeypatch.setattr(
        AgreedStop, "_start_exchange", lambda stop: [exchanges.append(len(polled)), exchange(stop)]
    )
    stop = AgreedStop(World())
    for number in range(400):
        polled.append(number)
        now[0] += seconds
        stop.poll()
    assert exchanges[-1] - exchanges[-2] == exchanges[-2] - exchanges[-3] == polls
