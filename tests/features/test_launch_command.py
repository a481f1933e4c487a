"""dist_amp launch: torchrun with defaults, checked settings, one last line and the true status."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from forked import Forked
from test_security import listening
from test_train import wait_for
from torch.distributed.elastic.metrics.api import MetricData
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from dist_amp.commands import elastic
from dist_amp.commands import launch as command
from dist_amp.commands.elastic import Report, RestartRefused, Watch, after_signal, death_of
from dist_amp.distributed.process import tell_launcher
from dist_amp.errors import Failure
from dist_amp.supervise import preflight
from dist_amp.supervise.failure import report_failure

# A stand-in for dist_amp.train, which starts in 0.1 s: argument n says how attempt n ends.
RANK = """
import json, os, signal, sys, time
way, *more = sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])].split(":", 3)
rank = os.environ["RANK"]

def end(text, status, step=0):
    facts = {"timestamp": str(int(time.time())), "status": status, "step": step, "line": text}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": text, "extraInfo": facts}}, file)
    os._exit(status)

def save(number, frame):
    time.sleep(0.5)
    end("", 75)

if way == "fails" and rank == "0":  # after so many steps, with this status and report
    step, status, text = more
    print(text, file=sys.stderr, flush=True)
    end(text, int(status), int(step))
if way == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "saves":  # at a signal
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, save)
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
    "`dist_amp launch` with an option that is almost one of torchrun's, or has no value"
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
        ("-m", "-m: expected one argument; see torchrun --help"),
        ("--nnodes two", "torchrun refuses its options: invalid literal for int() with base 10"),
        ("--nproc-per-node two", "--nproc-per-node=two must be a number above 0, auto, cpu, or"),
        ("--nnodes=2 --node-rank=2", "--node-rank=2 must be below --nnodes=2; the first is 0"),
        ("--log-dir /proc/x", "--log-dir=/proc/x can't be written (No such file or directory); "),
        ("--optim.lrr 1", "unknown key optim.lrr on the command line; did you mean optim.lr?"),
        ("--nproc-per-node 3 --train.global_batch_size 64", "train.global_batch_size=64 is not a"),
        ("-m dist_amp/train.py", "-m dist_amp/train.py: there is no such module to start in"),
        (
            f"{SMALL} --train.global_batch_size 12",
            "train.global_batch_size=12 must be a multiple of micro_batch_size 1 x 2 ranks x each "
            "of --nnodes=1:4, so of 24; use 24, or fewer nodes",
        ),
        (
            f"{SMALL} --train.global_batch_size 24 --parallel.bit_exact true",
            "parallel.bit_exact=true needs a power of two of ranks, and --nnodes=1:4 may have 6; "
            "use fewer nodes, or parallel.bit_exact=false",
        ),
        (SMALL, f"{NEEDS} would change with the number of nodes; use global_batch_size=24"),
        (f"{ELASTIC} --run.resume never", "--nnodes=1:4 restarts the run as nodes come and go: "),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(words, said, capfd, nothing_starts):
    assert command.main(words.split()) == 64
    out, err = capfd.readouterr()
    assert err.startswith(f"error: {said}")
    assert (out, err.count("\n")) == ("", 1)


def test_a_task_that_ends_the_process_is_one_line(tmp_path, capfd, nothing_starts):
    task = f"{tmp_path}/ending.py:Task"
    (tmp_path / "ending.py").write_text("import os; os._exit(0)")
    assert command.main(["--task.target", task]) == 64
    said = f"task.target={task}: importing it ended the process with exit code 0"
    assert capfd.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_is_one_line(number, capfd, monkeypatch):
    monkeypatch.setattr(command, "load_config", lambda _: time.sleep(60))  # in the fork
    threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
    assert command.main([]) == 1
    said = f"error: stopped by {number.name} before any rank had started\n"
    assert capfd.readouterr().err == said


# ---- the defaults


@pytest.fixture
def agent(monkeypatch):
    """(torchrun's options, ranks, whether elastic) of each start; nothing starts."""
    starts = []

    def run_agent(options, ranks, elastic):
        starts.append((options, ranks, elastic))
        return 0, ""

    monkeypatch.setattr(command, "run_agent", run_agent)
    return starts


@pytest.fixture
def started(monkeypatch, agent):
    """started(*words): the options that torchrun's agent gets."""
    names = ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_CPP_LOG_LEVEL")
    for name in (*names, *command.ALLOCATOR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*words):
        assert command.main([*words, "-m", "timeit"]) == 0
        return agent[-1][0]

    return run


def test_the_defaults_are_two_processes_on_the_cpu_with_restarts_and_the_signals_that_save(
    started, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    options = started()
    assert (options.nproc_per_node, options.max_restarts) == ("2", 3)
    assert options.local_addr == "127.0.0.1"
    assert options.rdzv_endpoint.startswith("127.0.0.1:")
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_rank_per_gpu_near_its_cpus_unless_told_otherwise(started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(command, "binding", lambda gpus: "node" if gpus else None)
    assert (started().nproc_per_node, started().numa_binding) == ("4", "node")
    assert started("--numa-binding=socket").numa_binding == "socket"
    assert command.gpus_to_use(["--run.device", "cpu"]) == 0


@pytest.mark.bad_input("ranks that can't be bound to the CPUs of their GPUs' NUMA nodes")
@pytest.mark.parametrize(
    ("nodes", "numactl", "why"),
    [
        (1, "", None),
        (2, "exit 0", ""),
        (2, "exit 1", "numactl is missing, or may not use all CPUs"),
    ],
)
def test_ranks_are_bound_where_torchrun_can_and_otherwise_told_why_not(
    nodes, numactl, why, tmp_path, monkeypatch, capsys
):
    for number in range(nodes):
        (tmp_path / f"node{number}").mkdir()
    (tmp_path / "numactl").write_text(f"#!/bin/sh\n{numactl}\n")
    (tmp_path / "numactl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.binding(2, tmp_path) == ("node" if why == "" else None)
    said = f"numa   ranks are not bound to the CPUs near their GPUs: {why}\n" if why else ""
    assert capsys.readouterr().err == said


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


def test_an_elastic_run_whose_batch_every_size_keeps_is_started(agent):
    assert command.main([*SMALL.split(), "--train.global_batch_size", "24"]) == 0
    ((options, *rest),) = agent
    assert (options.nnodes, options.max_restarts, *rest) == ("1:4", 100, 2, True)


@pytest.mark.bad_input("one of several machines without a GPU, and no `--nproc-per-node`")
def test_one_of_several_machines_without_a_gpu_says_so_unless_told_how_many_ranks(
    monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main(["--nnodes=2", "-m", "timeit"]) == 1
    said = "error: torch sees no GPU on this machine; fix that, or give --nproc-per"
    assert capsys.readouterr().err.startswith(said)


# ---- how the ranks ended


def is_restarted(watch, left, status, text="", step=0, at_start=False, transient=False):
    """Whether the ranks are started again after one that left such a report, as the main job's."""
    place = watch.folder / f"run/attempt_{left}/1"
    place.mkdir(parents=True)
    if status > 0:
        facts = {"timestamp": "0", "status": status, "step": step, "line": text}
        facts |= {"at_start": at_start, "transient": transient}
        message = {"message": text, "extraInfo": facts}
        (place / "error.json").write_text(json.dumps({"message": message}))
    watch.emit(MetricData(0, "torchelastic", "workers.default.remaining_restarts", left))
    try:
        watch.emit(MetricData(0, "torchelastic", "workers.default.failed", 1))
    except RestartRefused:
        return False
    return left > 0


SAVED = (75, "", 9)
X_AFTER_4, X_AFTER_6 = (1, "rank 1: X at 0x7f1", 4), (1, "rank 0: X at 0x7f2", 6)
Y_AFTER_6, Y_AGAIN = (1, "rank 0: Y", 6), (1, "rank 1: Y", 6)


@pytest.mark.parametrize(
    ("failures", "restarts"),
    [
        ([(64, "error: text")], 0),
        ([SAVED], 0),
        ([(70, "error: text", 9)], 0),
        ([(65, "error: text", 9)], 1),  # a disk may come back
        ([(-9,)] * 5, 4),
        # Before the first step, unless what a lost rank has left may be the cause.
        ([(65, "error: text", 0, True)], 0),
        ([(1, "a rank died", 0, True, True), (1, "rank 1: X", 500, True)], 2),
        # The same error with no step between.
        ([X_AFTER_4, X_AFTER_6, Y_AFTER_6, Y_AGAIN], 3),
    ],
)
def test_failures_that_would_come_again_are_not_restarted(failures, restarts, tmp_path):
    watch = Watch(tmp_path, 4)
    found = [is_restarted(watch, 4 - number, *how) for number, how in enumerate(failures)]
    assert found == [number < restarts for number in range(len(failures))]


def test_ranks_of_an_elastic_run_that_saved_as_a_node_left_are_restarted(tmp_path):
    assert is_restarted(Watch(tmp_path, 100, elastic=True), 100, *SAVED)


def test_a_rank_that_is_killed_or_reports_nothing_is_named():
    rank = "rank 1 (process 7)"
    assert death_of(rank, -9).startswith("rank 1 (process 7) was killed by SIGKILL (by the kernel")
    assert death_of(rank, -40) == "rank 1 (process 7) was killed by signal 40"
    assert death_of(rank, 3) == "rank 1 (process 7) ended with status 3 and reported nothing"


def test_a_report_has_the_status_and_the_errors_first_line_and_place(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "0")
    try:
        raise RuntimeError("first\nsecond\nthird")
    except RuntimeError as error:
        report_failure(error, None)
    report = elastic.report_from(file)
    expected = r"rank 0: RuntimeError: first \(test_launch_command.py, line \d+\)"
    assert re.fullmatch(expected, report.line)
    assert (report.status, report.at_start, report.transient) == (1, True, False)
    tell_launcher(75)
    assert elastic.report_from(file) == Report(75)


@pytest.mark.parametrize("text", ["{", '{"message": "as older torch has it"}'])
def test_an_error_file_that_another_module_wrote_is_an_error_without_a_text(text, tmp_path):
    (tmp_path / "error.json").write_text(text)
    assert elastic.report_from(tmp_path / "error.json") == Report(1)


@pytest.mark.parametrize(("nnodes", "status"), [("1", 64), ("2", 0)])
def test_one_launch_per_task_of_srun_is_refused_unless_it_knows_of_the_nodes(
    monkeypatch, capsys, nnodes, status
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setattr(command, "in_fork", lambda what, check: 0)
    monkeypatch.setattr(command, "start", lambda options, ranks: 0)
    assert command.main(["--nproc-per-node=1", f"--nnodes={nnodes}", "-m", "mine"]) == status
    assert ("SLURM_STEP_NUM_TASKS=2, but" in capsys.readouterr().err) == (status == 64)


EARLY = (
    "stopped by SIGINT before all ranks had saved and left; checkpoints written before are intact"
)


@pytest.mark.bad_input("ranks that did not save after a signal to the launcher, or had not started")
@pytest.mark.parametrize(
    ("reports", "end"),
    [
        ([Report(0), Report(75)], (75, "")),
        ([Report(0), Report(0)], (0, "")),
        ([Report(1, "error: text")], (1, "")),  # it has said why
        ([Report(75)], (1, EARLY)),
    ],
)
def test_after_a_signal_the_ranks_own_status_counts_and_one_that_did_not_save_is_said(reports, end):
    assert after_signal("SIGINT", reports, 2) == end


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
    ends = ["killed", "fails:3:65:ValueError: x", "fails:3:65:ValueError: x"]
    words = ["--nproc-per-node=2", "-m", "stand_in", *ends]
    done = launch.module("dist_amp.commands.launch", *words, timeout=60)
    assert done.returncode == 65, done.stderr
    first, *others = done.stderr.splitlines()
    assert first.startswith("restart 1 of 3: local rank 1 (process ")
    again = "not restarted: the same error came twice with no step between (after step 3)"
    last = f"error: ValueError: x; {again}"
    assert others == ["ValueError: x", "restart 2 of 3", "ValueError: x", last]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def test_a_signal_is_passed_on_and_the_status_is_what_the_ranks_end_with(launch, tmp_path):
    (tmp_path / "stand_in.py").write_text(RANK)
    words = ["--nproc-per-node=2", "-m", "stand_in", "saves"]
    job = Forked(words, tmp_path, launch.environ({}), "dist_amp.commands.launch")
    wait_for(lambda: len(list(tmp_path.glob("rank?"))) == 2, "the start of the ranks", 60)
    addresses = {*listening(job.pid)}
    job.send_signal(signal.SIGINT)
    job.send_signal(signal.SIGINT)  # as a Ctrl-C that comes twice: the ranks are still saving
    _, err = job.communicate(60)
    assert (job.returncode, err) == (75, "")
    assert addresses, "the launcher has a store"
    assert addresses <= LOOPBACK
    assert (tmp_path / "rank0").read_text() == "127.0.0.1", "where the ranks listen"


def test_a_signal_in_the_middle_of_the_ranks_start_leaves_none_behind(tmp_path, launch):
    """It is sent by the first rank, while the second one is not there."""
    code = "import os, signal, time\nopen(f'rank{os.getpid()}', 'w')\n"
    code += "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n"
    (tmp_path / "sleeps.py").write_text(code)
    words = ["--nproc-per-node=8", "-m", "sleeps"]
    job = Forked(words, tmp_path, launch.environ({}), "dist_amp.commands.launch")
    _, err = job.communicate(60)
    assert (job.returncode, err.count("\n")) == (1, 1)
    assert err.startswith("error: stopped by SIGTERM before all ranks had saved and left")
    for path in tmp_path.glob("rank*"):
        assert not Path(f"/proc/{path.name[4:]}").exists()


def test_a_second_interrupt_kills_ranks_that_save_but_not_one_that_is_sent_twice(
    monkeypatch, tmp_path
):
    killed = []
    monkeypatch.setattr(elastic, "children", lambda: [7, 8])
    monkeypatch.setattr(elastic.os, "kill", lambda pid, number: killed.append(pid))
    watch = Watch(tmp_path, 3)
    for number, at in ((signal.SIGINT, 1.0), (signal.SIGINT, 1.5), (signal.SIGTERM, 2.5)):
        monkeypatch.setattr(elastic.time, "monotonic", lambda at=at: at)
        watch.on_signal(number, None)
        assert killed == []
    watch.on_signal(signal.SIGINT, None)
    assert killed == [7, 8]


def test_a_signal_while_machines_are_waited_for_ends_the_launcher_at_once(
    tmp_path, launch, request
):
    words = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    words += " --rdzv-conf=is_host=1 --local-addr=127.0.0.1 -m timeit"
    job = Forked(words.split(), tmp_path, launch.environ({}), "dist_amp.commands.launch")
    request.addfinalizer(job.kill)
    said = job._output / "stdout"
    wait_for(lambda: said.exists() and "waits for" in said.read_text(), "the launcher", 60)
    time.sleep(1)  # until it is in the rendezvous; before, it would end as quickly
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(10)
    assert (job.returncode, err) == (1, "error: stopped by SIGTERM before any rank had started\n")


def test_a_rank_whose_launcher_is_gone_does_not_start(monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {"TORCHELASTIC_RUN_ID": "1", "DIST_AMP_LAUNCHER": str(gone.pid), "DIST_AMP_NNODES": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Failure, match="the launcher .* is gone"):
        preflight.check_launch()


@pytest.mark.bad_input("a machine whose clock is an hour off, which torchrun takes for dead")
@pytest.mark.parametrize(("nnodes", "is_enough"), [("2", False), ("1:4", True), ("2:4", False)])
def test_fewer_machines_than_were_asked_for_do_not_train_alone(nnodes, is_enough, monkeypatch):
    names = {"TORCHELASTIC_RUN_ID": "1", "DIST_AMP_LAUNCHER": str(os.getpid())}
    names |= {"GROUP_WORLD_SIZE": "1", "DIST_AMP_NNODES": nnodes}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    said = f"all but 1 of --nnodes={nnodes} machines while they joined"
    with nullcontext() if is_enough else pytest.raises(Failure, match=said):
        preflight.check_launch()
