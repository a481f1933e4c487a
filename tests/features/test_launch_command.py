"""dist_amp launch: torchrun's agent with our defaults, checked settings, one last line and the true
status.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from forked import Forked
from test_security import listening
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import api as agents
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api

from dist_amp.commands import elastic
from dist_amp.commands import launch as command
from dist_amp.commands.elastic import Restarts, Signals, after_signal, who_explains
from dist_amp.distributed.process import in_thread
from dist_amp.errors import ConfigError, Failure
from dist_amp.supervise import preflight
from dist_amp.supervise.failure import report_failure

# A stand-in for dist_amp.train, which starts in 0.1 s: argument n says how the ranks end in attempt
# n.
RANK = """
import json, os, signal, sys, time
ways = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
way, *more = ways[min(attempt, len(ways) - 1)].split(":", 3)
rank = os.environ["RANK"]
if way == "fails":  # after so many steps, with this status and report
    if rank == "1":
        time.sleep(60)
    step, status, text = more
    print(text, file=sys.stderr, flush=True)
    facts = {"timestamp": str(int(time.time())), "step": int(step)}
    message = {"message": text, "extraInfo": facts}
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps({"message": message}))
    sys.exit(int(status))
if way == "killed":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if way == "waits":  # for a signal, and exits with this status
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(int(more[0])))
    with open(f"rank{rank}", "w") as file:
        file.write(os.environ["MASTER_ADDR"])
    time.sleep(60)
"""


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(command, "run_agent", lambda *_: pytest.fail("started"))


# ---- the command line


SETTINGS = "--config a --no.x=1 --r.a -1"


@pytest.mark.parametrize(
    ("words", "nodes", "module", "rest"),
    [
        ("--config a --nnodes 2 --standalone --no.x=1 --r.a -1", "2", "dist_amp.train", SETTINGS),
        ("--nnodes=2 -m dist_amp.train --a.b 1", "2", "dist_amp.train", "--a.b 1"),
        ("-m=mine -- 2", "1:1", "mine", "-- 2"),
        ("--nnodes=2 -- --a.b 1", "2", "dist_amp.train", "--a.b 1"),
        ("-m mine --nnodes 2", "1:1", "mine", "--nnodes 2"),
    ],
)
def test_torchruns_options_stand_anywhere_before_the_module_and_no_setting_is_taken_for_one(
    words, nodes, module, rest
):
    options, *found = command.parse(words.split())
    assert (options.nnodes, *found) == (nodes, module, rest.split())


ELASTIC = "--nnodes 1:4 --nproc-per-node 2 --run.dir shared"
SMALL = f"{ELASTIC} --train.micro_batch_size 1"
NEEDS = "--nnodes=1:4 needs train.global_batch_size and train.accumulation_steps=auto, or the batch"


@pytest.mark.bad_input(
    "`dist_amp launch` with an option that is almost one of torchrun's, another launcher's, or has "
    "no value"
)
@pytest.mark.bad_input(
    "`dist_amp launch` with a value that torchrun refuses, a wrong setting, or no such module or "
    "task"
)
@pytest.mark.bad_input(
    "`dist_amp launch --nnodes MIN:MAX` with settings that not every size can keep"
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nproc-per-nod 4", "unknown option --nproc-per-nod; did you mean --nproc-per-node?"),
        ("--gpus 2", "unknown option --gpus; did you mean --nproc-per-node?"),
        ("--train.steps 2 --nnodes", "--nnodes: expected one argument; see torchrun --help"),
        ("-m", "-m: expected one argument; see torchrun --help"),
        ("--max-restarts two", "--max-restarts: invalid int value: 'two'; see torchrun --help"),
        ("--nnodes two", "torchrun refuses its options: invalid literal for int() with base 10"),
        ("--nproc-per-node two", "--nproc-per-node=two must be a number above 0, auto, cpu, or"),
        ("--nnodes=2 --node-rank=3", "--node-rank=3 must be below --nnodes=2; the first is 0"),
        ("--log-dir /proc/x", "--log-dir=/proc/x can't be written (No such file or directory); "),
        ("--optim.lrr 1", "unknown key optim.lrr on the command line; did you mean optim.lr?"),
        ("--nproc-per-node 3 --train.global_batch_size 64", "train.global_batch_size=64 is not a"),
        ("train.py", "'train.py' on the command line belongs to no key; write --section.key"),
        ("train.steps 5", "'train.steps' on the command line belongs to no key; write --train.st"),
        ("-m dist_amp/train.py", "-m dist_amp/train.py: there is no such module to start in"),
        ("--help optin", "--help optin: no section or setting has this word; did you mean optim?"),
        (
            f"{SMALL} --train.global_batch_size 12",
            "train.global_batch_size=12 fits --nnodes=1:3, not 4 (12 is no multiple of "
            "micro_batch_size 1 x 8 ranks); use that or train.global_batch_size=24",
        ),
        (
            f"{SMALL} --train.global_batch_size 24 --parallel.bit_exact true",
            "parallel.bit_exact=true fits --nnodes=1:2, not 3 (6 ranks are no power of two); use "
            "that or parallel.bit_exact=false",
        ),
        (
            f"{ELASTIC} --train.micro_batch_size 8 --train.global_batch_size 12",
            "train.global_batch_size=12 doesn't fit --nnodes=1 (12 is no multiple of "
            "micro_batch_size 8 x 2 ranks); use train.global_batch_size=192",
        ),
        (SMALL, f"{NEEDS} would change with the number of nodes; use global_batch_size=24"),
        (f"{SMALL} --train.global_batch_size 24 --train.accumulation_steps 2", NEEDS),
        (f"{ELASTIC} --run.resume never", "--nnodes=1:4 restarts the run as nodes come and go: "),
        (f"{ELASTIC} --run.dir auto", "--nnodes=1:4 restarts the run as nodes come and go: give "),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(words, said, capfd, nothing_starts):
    assert command.main(words.split()) == 64
    out, err = capfd.readouterr()
    assert err.startswith(f"error: {said}")
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(0)", "ended the process with exit code 0"),
        ("raise RuntimeError('one\\ntwo')", "failed with RuntimeError: one"),
    ],
)
def test_a_task_whose_import_ends_is_one_line(code, said, tmp_path, capfd, nothing_starts):
    task = f"{tmp_path}/ending.py:Task"
    (tmp_path / "ending.py").write_text(code)
    assert command.main(["--task.target", task]) == 64
    err = capfd.readouterr().err
    assert err.startswith(f"error: task.target={task}: importing it {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_is_one_line(number, capfd, monkeypatch):
    monkeypatch.setattr(command, "load_config", lambda _: time.sleep(60))  # in the fork
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    assert command.main([]) == 1
    said = f"error: stopped by {number.name} before any rank had started\n"
    assert capfd.readouterr().err == said


def test_a_signal_during_the_imports_is_one_line(tmp_path):
    in_torchs_place = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    (tmp_path / "torch.py").write_text(in_torchs_place)
    words = [sys.executable, "-m", "dist_amp.launch"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60)
    started, said = done.stderr.splitlines()
    assert started.startswith("launch checks the settings, then starts the ranks")
    assert (done.returncode, said) == (1, "error: stopped by SIGINT before any rank had started")


# ---- the defaults


@pytest.fixture
def started(monkeypatch):
    """started(*words): the options that torchrun's agent gets; nothing starts."""
    names = ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_CPP_LOG_LEVEL")
    for name in (*names, *command.ALLOCATOR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    seen = []
    monkeypatch.setattr(command, "run_agent", lambda options, *_: seen.append(options))

    def run(*words):
        assert command.main([*words, "-m", "timeit"]) == 0
        return seen[-1]

    return run


def test_the_defaults_are_two_processes_on_the_cpu_with_restarts_and_the_signals_that_save(
    started, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    options = started()
    assert (options.nproc_per_node, options.max_restarts) == ("2", 3)
    assert (options.local_addr, options.standalone) == ("127.0.0.1", True)
    assert "SIGUSR1" in options.signals_to_handle
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_rank_per_gpu_near_its_cpus_unless_told_otherwise(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(command, "binding", lambda ranks, gpus: "node" if ranks == gpus else None)
    assert (started().nproc_per_node, started().numa_binding) == ("4", "node")
    assert started("--nproc-per-node=3").numa_binding is None
    assert started("--numa-binding=socket").numa_binding == "socket"
    assert command.gpus_to_use(["--run.device", "cpu"]) == 0


@pytest.mark.bad_input("ranks that can't be bound to the CPUs of their GPUs' NUMA nodes")
@pytest.mark.parametrize(
    ("nodes", "numactl", "why"),
    [
        (1, "", None),  # nothing to bind
        (2, "exit 0", ""),
        (2, "exit 1", "numactl fails"),
        (2, "", "numactl CLI is required for NUMA binding"),
    ],
)
def test_ranks_are_bound_where_torchrun_can_and_otherwise_told_why_not(
    nodes, numactl, why, tmp_path, monkeypatch, capsys
):
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    if numactl:
        (tmp_path / "numactl").write_text(f"#!/bin/sh\n{numactl}\n")
        (tmp_path / "numactl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    of_torch = "torch.numa.binding._node_get_logical_cpus_to_bind_to"
    monkeypatch.setattr(of_torch, lambda gpu_index: {0})
    assert command.binding(2, 2, tmp_path) == ("node" if why == "" else None)
    said = f"numa   ranks are not bound to the CPUs near their GPUs: {why}\n" if why else ""
    assert capsys.readouterr().err == said


def test_gpus_that_torch_cannot_use_are_refused_once(monkeypatch):
    def refuse():
        raise ConfigError("a reason")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(command, "check_gpus_are_used", refuse)
    assert command.main([]) == 64


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_users_allocator_settings_stay(given, used, started, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    started()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == used


def test_torchruns_own_variables_and_several_machines_are_passed_on(started, monkeypatch, capsys):
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    place = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500"
    options = started(*place.split())
    assert (options.max_restarts, options.nnodes) == (7, "2")
    assert (options.rdzv_endpoint, options.local_addr) == ("10.0.0.1:29500", None)
    said = "2 machines: this one waits for the others at 10.0.0.1:29500\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "words",
    ["--train.micro_batch_size 1 --train.global_batch_size 24", "--run.allow_config_change true"],
)
def test_sizes_that_all_keep_the_batch_are_started(words, monkeypatch):
    started = []
    monkeypatch.setattr(command, "run_agent", lambda *given: started.append(given))
    assert command.main([*ELASTIC.split(), *words.split()]) == 0
    ((options, restarts),) = started
    assert (options.nnodes, restarts.elastic) == ("1:4", True)


@pytest.mark.bad_input("one of several machines without a GPU, and no `--nproc-per-node`")
def test_one_of_several_machines_without_a_gpu_says_so_unless_told_how_many_ranks(
    monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main(["--nnodes=2", "-m", "timeit"]) == 1
    said = "error: torch sees no GPU on this machine; fix that, or give --nproc-per"
    assert capsys.readouterr().err.startswith(said)


# ---- how the ranks ended


def failure(status, text="", step=0, **more):
    found = ProcessFailure(local_rank=1, pid=7, exitcode=status, error_file="none")
    if text:
        found.message = {"message": text, "extraInfo": {"timestamp": "0", "step": step, **more}}
    return {1: found}


LOST = failure(1, "error: rank 0 died without an error", transient=True)
AT_START = failure(1, "rank 1: ValueError: x", step=500, at_start=True)


@pytest.mark.parametrize(
    ("failures", "restarted"),
    [
        ([failure(64, "error: text")], [False]),
        ([failure(75)], [False]),
        ([failure(70, "error: text", 9)], [False]),
        ([failure(65, "error: text")], [False]),
        ([failure(65, "error: text", 9)], [True]),  # a disk may come back
        ([failure(1, "error: text")], [False]),  # an exception of the task, a folder in use
        ([failure(1, "error: text", 9)], [True]),
        ([failure(-9), failure(-9), failure(-9)], [True, True, False]),
        ([LOST, LOST], [True, True]),  # another rank is the cause
        ([AT_START], [False]),  # resumed, and failed before its first step
        ([failure(-9), AT_START], [True, True]),  # what the killed rank left may be the cause
    ],
)
def test_failures_that_would_come_again_are_not_restarted(failures, restarted):
    restarts = Restarts(2)
    found = [bool(restarts(each, 2 - number)) for number, each in enumerate(failures)]
    assert found == restarted


def test_a_rank_that_is_killed_or_reports_nothing_is_named():
    restarts = Restarts(2)
    line = restarts.line(who_explains(failure(-9)))
    assert line.startswith("rank 1 (process 7) was killed by SIGKILL")
    line = restarts.line(who_explains(failure(3)))
    assert line == "rank 1 (process 7) ended with status 3 and reported nothing"


def test_the_same_error_with_no_step_between_is_not_restarted_and_one_after_progress_is(capsys):
    restarts = Restarts(5)
    assert restarts(failure(1, "rank 1: ValueError: x at 0x7f1", step=4), 5)
    assert restarts(failure(1, "rank 0: ValueError: x at 0x7f2", step=6), 4), "two steps further"
    assert restarts(failure(1, "rank 0: ValueError: y", step=6), 3), "another error"
    again = failure(1, "rank 1: ValueError: y", step=6)
    assert not restarts(again, 2)
    assert restarts.line(who_explains(again)).startswith("rank 1: ValueError: y; not restarted")
    numbers = re.findall(r"restart (\d) of 5", capsys.readouterr().err)
    assert numbers == ["1", "2", "3"]


def test_the_last_line_has_the_errors_first_line_and_place(tmp_path, monkeypatch, capsys):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "0")
    try:
        raise RuntimeError("first\nsecond\nthird")
    except RuntimeError as error:
        report_failure(error, None)
    report = ProcessFailure(local_rank=0, pid=7, exitcode=1, error_file=str(file))
    cause = who_explains({0: report}).cause
    assert re.fullmatch(r"rank 0: RuntimeError: first \(test_launch_command.py, line \d+\)", cause)


@pytest.mark.parametrize(("nnodes", "status"), [("1", 64), ("2", 0)])
def test_one_launch_per_task_of_srun_is_refused_unless_it_knows_of_the_nodes(
    monkeypatch, capsys, nnodes, status
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(command, "in_fork", lambda what, check: 0)
    monkeypatch.setattr(command, "start", lambda options: 0)
    assert command.main(["--nproc-per-node=1", f"--nnodes={nnodes}", "-m", "mine"]) == status
    assert ("SLURM_STEP_NUM_TASKS=2, but" in capsys.readouterr().err) == (status == 64)


@pytest.mark.parametrize(("codes", "status"), [([], 64), ([1, -15], 1)])
def test_a_value_error_is_a_mistake_in_the_options_only_before_ranks_were_started(
    codes, status, monkeypatch, capsys
):
    def run_agent(*_):
        error = ValueError("Expecting value")
        error.exit_codes = codes
        raise error

    monkeypatch.setattr(command, "run_agent", run_agent)
    assert command.main(["-m", "timeit"]) == status


def test_in_an_elastic_run_a_node_that_leaves_uses_up_no_restart_and_progress_renews_them(
    capsys,
):
    restarts = Restarts(3, elastic=True)
    assert restarts(failure(75), 2) == 3, "torch's agent takes one away"
    assert restarts(failure(75), 0, joins=True) == 1
    left, joined = capsys.readouterr().err.splitlines()
    assert left == "nodes  one has left: all ranks save and restart"
    assert joined == "nodes  one joins: all ranks save and restart"
    lost = failure(1, "error: rank 0 died without an error", step=6, transient=True)
    assert restarts(lost, 1) == 3, "six steps were taken"
    assert restarts(lost, 2) == 2, "none since"
    assert restarts(lost, 0) == 0
    assert restarts(failure(64, "error: text", 6), 3) == 0
    assert Restarts(3)(failure(75), 3) == 0, "of a fixed number of nodes"


@pytest.mark.bad_input("ranks that did not save after a signal to the launcher, or had not started")
def test_after_a_signal_the_ranks_own_status_counts_and_one_that_did_not_save_is_said():
    assert after_signal("SIGTERM", [75, 75]) == (75, "")
    assert after_signal("SIGTERM", [0, 0]) == (0, "")
    assert after_signal("SIGTERM", [1, 1]) == (1, ""), "they have said why"
    status, line = after_signal("SIGINT", [75, -9])
    early = "stopped by SIGINT before all ranks had saved and left (ranks ended by SIGKILL)"
    assert (status, line) == (1, f"{early}; checkpoints written before are intact")
    assert after_signal("SIGINT", [])[0] == 1


@pytest.mark.bad_input(
    "a rendezvous that is not reached, closed, incomplete, or whose port is taken"
)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousTimeoutError(), "not all of --nnodes=2 machines joined the rendezvous at here"),
        (RendezvousClosedError(), "the rendezvous at here:1 is closed: another machine's last"),
        (RuntimeError("... EADDRINUSE ..."), "the port of here:1 is in use on this machine; ch"),
        (RendezvousConnectionError("Off. Try again"), "no rendezvous at here:1 (Off); start mach"),
        (RuntimeError("what"), "torchrun failed: RuntimeError: what"),
    ],
)
def test_what_torchrun_fails_with_is_one_line(error, said):
    text = command.why_torchrun_failed(error, "here:1", "2")
    assert text.startswith(said)
    assert "\n" not in text


# ---- the agent, with stand-ins for ranks


@pytest.mark.bad_input("an error that comes again after a restart, with no step between")
def test_an_error_that_comes_twice_ends_the_run_with_the_ranks_status_and_a_last_line(launch):
    (launch.folder / "stand_in.py").write_text(RANK)
    ends = ["killed", "fails:3:65:ValueError: x", "fails:3:65:ValueError: x", "never"]
    words = ["--nproc-per-node=2", "-m", "stand_in", *ends]
    done = launch.module("dist_amp.commands.launch", *words, timeout=60)
    assert done.returncode == 65, done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith("restart 1 of 3: rank 1 (process ")
    again = "not restarted: the same error came twice with no step between (after step 3)"
    last = f"error: ValueError: x; {again}"
    assert others == ["ValueError: x", "restart 2 of 3", "ValueError: x", last]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def wait_for_ranks(folder):
    deadline = time.monotonic() + 60  # ends a test that hangs
    while len(list(folder.glob("rank?"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_status_is_what_the_ranks_end_with(launch, tmp_path, number):
    (tmp_path / "stand_in.py").write_text(RANK)
    words = ["--nproc-per-node=2", "-m", "stand_in", "waits:75"]
    job = Forked(words, tmp_path, launch.environ({}), "dist_amp.commands.launch")
    wait_for_ranks(tmp_path)
    addresses = {*listening(job.pid)}
    job.send_signal(number)
    job.send_signal(number)  # as a Ctrl-C that comes twice: the ranks are still saving
    _, err = job.communicate(60)
    assert (job.returncode, err) == (75, "")
    assert addresses, "the launcher has a store"
    assert addresses <= LOOPBACK
    assert (tmp_path / "rank0").read_text() == "127.0.0.1", "where the ranks listen"


@pytest.fixture
def agents_signals():
    """For a launcher in this process, which sets handlers."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_signal_in_the_middle_of_the_ranks_start_leaves_none_behind(
    tmp_path, monkeypatch, agents_signals
):
    started = []

    class Half(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)
            if len(started) == 1:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    Path("sleeps.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(subprocess_handler, "Popen", Half)
    try:
        assert command.main(["--nproc-per-node=2", "-m", "sleeps"]) == 1
    finally:
        for rank in started:
            rank.kill()
    ended = [rank.returncode not in (None, -signal.SIGKILL) for rank in started]
    assert ended == [True, True], "the agent ended both"


def test_a_second_signal_before_the_agent_acts_on_the_first_is_not_taken_for_a_node_that_joins(
    tmp_path, monkeypatch, agents_signals, capfd
):
    saving = []

    def send(*_):
        os.kill(os.getpid(), signal.SIGINT)

    def first(agent, group):
        wait_for_ranks(tmp_path)
        send()

    monkeypatch.chdir(tmp_path)
    Path("stand_in.py").write_text(RANK)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", first)
    monkeypatch.setattr(agents.logger, "warning", send)  # what it does first on a signal
    monkeypatch.setattr(Signals, "saving", lambda self, ranks: saving.append(len(ranks)))
    assert command.main(["--nproc-per-node=2", "-m", "stand_in", "waits:75"]) == 75
    assert saving == [2], "a third one that is sent at once does not end the launcher"
    assert capfd.readouterr().err == ""


def test_ranks_that_stop_for_a_node_that_joins_get_the_time_of_a_signal_for_saving(
    monkeypatch, capsys
):
    given = []
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda _, **options: given.append(options))

    def stop_workers(options):
        agent = api.LocalElasticAgent.__new__(api.LocalElasticAgent)
        agent._shutdown_timeout = 120
        for state in (WorkerState.HEALTHY, WorkerState.FAILED):
            agent._worker_group = SimpleNamespace(state=state)
            agent._stop_workers(agent._worker_group)

    monkeypatch.setattr(torchrun, "run", stop_workers)
    elastic.run_agent(None, Restarts(3))
    assert given == [{"timeout": 120}, {}]
    assert capsys.readouterr().err == "nodes  one joins: all ranks save and restart\n"


@pytest.fixture
def two_nodes():
    """The rendezvous handlers of two nodes, which both have joined."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    handlers = []
    for number in (1, 2):
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        backend = C10dRendezvousBackend(client, "two")
        address = f"127.0.0.{number}"
        handlers.append(
            DynamicRendezvousHandler.from_backend("two", client, backend, 1, 2, address)
        )
    joins = [in_thread(handler.next_rendezvous) for handler in handlers]
    for join in joins:
        join.result(60)
    yield handlers
    for handler in handlers:
        handler._stop_heartbeats()


def test_the_others_notice_a_node_that_leaves_although_their_ranks_wait_for_it(two_nodes):
    stays, leaves = two_nodes
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=stays), group_world_size=2)
    stays.num_nodes_waiting()
    assert elastic.is_complete(group)
    elastic.leave(leaves, 0)
    time.sleep(1.1)  # torch asks its store each second
    stays.num_nodes_waiting()
    assert not elastic.is_complete(group)


def test_a_second_interrupt_kills_ranks_that_save_but_not_one_that_is_sent_twice(monkeypatch):
    killed = []
    now = [1.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    signals = Signals()
    signals.saving([SimpleNamespace(kill=lambda rank=rank: killed.append(rank)) for rank in (0, 1)])
    for number, seconds in ((signal.SIGINT, 1.5), (signal.SIGTERM, 2.5)):
        now[0] = seconds
        signals(number, None)
        assert killed == []
    signals(signal.SIGINT, None)
    assert killed == [0, 1]


def test_a_rank_whose_launcher_is_gone_does_not_start(monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("DIST_AMP_LAUNCHER", str(os.getpid()))
    preflight.check_launch()
    monkeypatch.setenv("DIST_AMP_LAUNCHER", str(gone.pid))
    with pytest.raises(Failure, match="the launcher .* is gone"):
        preflight.check_launch()


@pytest.mark.slow
@pytest.mark.bad_input("a rendezvous at a name that does not resolve")
def test_an_unresolved_address_is_one_line_without_torchs_frames():
    place = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=nobody.invalid:29779"
    words = [*place.split(), "--rdzv-conf=read_timeout=1", "-m", "timeit"]
    command_line = [sys.executable, "-m", "dist_amp.launch", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("TORCH_CPP_LOG_LEVEL", None)
    done = subprocess.run(command_line, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == Failure.exit_code
    _, said = done.stderr.splitlines()
    assert said.startswith("error: no rendezvous at nobody.invalid:29779 (")
