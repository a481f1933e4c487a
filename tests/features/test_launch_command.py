"""dist_amp launch: torchrun with defaults, checked settings, one last line and the true status."""

import json
import os
import signal
import subprocess
import time
from argparse import Namespace
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from test_security import listening
from test_train import wait_for
from torch.distributed.elastic.metrics.api import MetricData
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from dist_amp.commands import elastic
from dist_amp.commands import launch as command
from dist_amp.commands.elastic import Report, RestartRefused, Watch, after_signal
from dist_amp.commands.launch import TRAIN
from dist_amp.distributed.process import tell_launcher
from dist_amp.errors import Failure
from dist_amp.supervise import preflight
from dist_amp.supervise.failure import report_failure

# A stand-in for dist_amp.train, which starts in 0.1 s: argument n says how attempt n ends.
RANK = """
import json, os, signal, sys, time
way, *more = sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])].split(":", 2)
rank = os.environ["RANK"]

def end(text, status):
    facts = {"timestamp": str(int(time.time())), "status": status}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": text, "extraInfo": facts}}, file)
    os._exit(status)

def save(number, frame):
    time.sleep(0.5)
    end("", 75)

if way == "fails" and rank == "0":  # with this status and report
    status, text = more
    print(text, file=sys.stderr, flush=True)
    end(text, int(status))
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
def agent(monkeypatch):
    """(torchrun's options, ranks, whether elastic) of each start; nothing starts."""
    starts = []
    monkeypatch.setattr(
        command,
        "run_agent",
        lambda *start, **more: starts.append((*start, *more.values())) or (0, ""),
    )
    return starts


# ---- the command line


@pytest.mark.parametrize(
    ("words", "nodes", "module", "rest"),
    [
        ("--config a --nnodes 2 --no.x=1 --r.a -1", "2", TRAIN, "--config a --no.x=1 --r.a -1"),
        ("--nnodes=2 -m dist_amp.train --a.b 1", "2", TRAIN, "--a.b 1"),
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
NEEDS = (
    "--nnodes=1:4 needs a train.global_batch_size that every number of nodes can share, such as 24"
)


@pytest.mark.bad_input("`dist_amp launch` with an option that is almost one of torchrun's")
@pytest.mark.bad_input("`dist_amp launch` with a wrong option or setting, or a task that exits")
@pytest.mark.bad_input("`dist_amp launch --nnodes MIN:MAX` with a batch that not every size keeps")
@pytest.mark.bad_input("one of several machines without a GPU, and no `--nproc-per-node`")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nproc-per-nod 4", "unknown key nproc_per_nod on the command line; --help lists"),
        ("--nproc-per-node two", "--nnodes=1:1 --nproc-per-node=two: Unsupported nproc_per_node"),
        ("--optim.lrr 1", "unknown key optim.lrr on the command line; did you mean optim.lr?"),
        ("--nproc-per-node 3 --train.global_batch_size 64", "train.global_batch_size=64 is not a"),
        ("--task.target exits.py:T", "task.target=exits.py:T: importing it failed with"),
        (f"{SMALL} --train.global_batch_size 12", "train.global_batch_size=12 is not a multiple"),
        (SMALL, NEEDS),
        (f"{ELASTIC} --run.resume never", "--nnodes=1:4 restarts the run as nodes join and leave"),
        (
            "--nnodes=2 -m timeit",
            "torch sees no GPU on this machine; fix that, or give --nproc-per",
        ),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_starts(
    words, message, capfd, agent, tmp_path, monkeypatch
):
    (tmp_path / "exits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert command.main(words.split()) == (1 if "GPU" in message else 64)
    out, err = capfd.readouterr()
    assert err.startswith(f"error: {message}")
    assert (out, err.count("\n"), agent) == ("", 1, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_any_rank_is_one_line(number, capfd, monkeypatch):
    monkeypatch.setattr(
        command, "load_config", lambda _: os.kill(os.getpid(), number) or time.sleep(60)
    )
    assert command.main([]) == 1
    message = f"error: stopped by {number.name} before any rank had started\n"
    assert capfd.readouterr().err == message


# ---- the defaults


ALLOCATORS = [f"PYTORCH_{kind}ALLOC_CONF" for kind in ("", "CUDA_", "HIP_")]


@pytest.fixture
def started(monkeypatch, agent):
    """started(words, gpus): the options that torchrun's agent gets on a machine of 8 cores."""
    for name in ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", *ALLOCATORS):
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    def run(words="-m timeit", gpus=0):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        assert command.main(words.split()) == 0
        return agent[-1][0]

    return run


def test_the_defaults_are_a_rank_per_gpu_or_two_on_the_cpu_and_restarts(started):
    options = started()
    assert (options.nproc_per_node, options.max_restarts) == ("2", 3)
    assert options.local_addr == "127.0.0.1"
    assert options.rdzv_endpoint.startswith("127.0.0.1:")
    assert os.environ["OMP_NUM_THREADS"] == "4"
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert started(gpus=4).nproc_per_node == "4"
    assert started("--run.device cpu", gpus=4).nproc_per_node == "2"


@pytest.mark.parametrize("name", ALLOCATORS)
def test_the_users_allocator_settings_stay(name, started, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    started()
    assert [os.environ[each] for each in ALLOCATORS if os.environ[each]] == ["max_split_size_mb:64"]


def test_torchruns_own_variables_and_several_machines_are_passed_on(started, monkeypatch, capsys):
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    place = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=10.0.0.1:29500"
    options = started(f"{place} -m timeit")
    assert (options.max_restarts, options.nnodes) == (7, "2")
    assert (options.rdzv_endpoint, options.local_addr) == ("10.0.0.1:29500", None)
    assert options.rdzv_conf == "read_timeout=150"
    message = "2 machines: this one waits for the others at 10.0.0.1:29500\n"
    assert capsys.readouterr().out == message


def test_an_elastic_run_whose_batch_every_size_keeps_is_started(agent):
    assert command.main([*SMALL.split(), "--train.global_batch_size", "24"]) == 0
    ((options, *rest),) = agent
    assert (options.nnodes, options.max_restarts, *rest) == ("1:4", 100, 2, True)


# ---- how the ranks ended


@pytest.mark.parametrize(
    ("failures", "restarts", "elastic"),
    [
        ([Report(64, "error: text")], 0, False),
        ([Report(70, "error: text")], 0, False),
        ([Report(75)], 0, False),
        ([Report(75)], 1, True),  # the ranks saved as a node left
        ([Report(65, "error: text")], 1, False),  # a disk may come back
        ([None] * 5, 4, False),  # killed
        # Before the first step, unless what a lost rank has left may be the cause.
        ([Report(65, "error: text", True)], 0, False),
        ([Report(1, "a rank died", True, True), Report(1, "rank 1: X", True)], 2, False),
    ],
)
def test_failures_that_would_come_again_are_not_restarted(failures, restarts, elastic, tmp_path):
    watch = Watch(tmp_path, 4, elastic)
    restarted = 0
    for left, report in zip(range(4, -1, -1), failures, strict=False):
        if report is not None:
            file = tmp_path / f"run/attempt_{left}/1/error.json"
            file.parent.mkdir(parents=True)
            message = {"message": report.text, "extraInfo": report._asdict()}
            file.write_text(json.dumps({"message": message}))
        watch.emit(MetricData(0, "torchelastic", "workers.default.remaining_restarts", left))
        with suppress(RestartRefused):
            watch.emit(MetricData(0, "torchelastic", "workers.default.failed", 1))
            restarted += left > 0
    assert restarted == restarts


@pytest.mark.parametrize(
    ("exit_code", "status", "message"),
    [
        (-9, 1, "was killed by SIGKILL (by the kernel, if memory ran out)"),
        (-1, 1, "was killed by SIGHUP"),
        (3, 3, "ended with status 3 and no report"),
    ],
)
def test_a_rank_that_ends_without_a_report_is_named_and_the_status_is_no_success(
    exit_code, status, message, tmp_path, monkeypatch
):
    def run(options):
        failure = ProcessFailure(local_rank=1, pid=7, exitcode=exit_code, error_file="none")
        raise ChildFailedError("stand_in", {1: failure})

    monkeypatch.setattr(elastic.torchrun, "run", run)
    options = Namespace(log_dir=str(tmp_path), max_restarts=0)
    end = elastic.run_agent(options, 2, elastic=False)
    assert end == (status, f"rank 1 (process 7) {message}")


def test_a_report_has_the_status_and_the_error_unless_another_module_wrote_the_file(
    tmp_path, monkeypatch
):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "0")
    report_failure(RuntimeError("first\nsecond"), None)
    assert elastic.read_report(file) == Report(1, "rank 0: RuntimeError: first\nsecond", True)
    tell_launcher(75)
    assert elastic.read_report(file) == Report(75)
    for text in ("{", '{"message": "as older torch has it"}'):
        file.write_text(text)
        assert elastic.read_report(file) == Report(1)


EARLY = "stopped by SIGINT before all ranks had saved and exited"


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
    status, line = after_signal("SIGINT", reports, 2)
    assert (status, line.partition(";")[0]) == end


@pytest.mark.bad_input("a rendezvous that is not reached or incomplete, or whose port is taken")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RendezvousTimeoutError(), "too few of --nnodes=2 machines joined the rendezvous at here"),
        (OSError("Off"), "torchrun failed with its rendezvous at here:1: OSError: Off"),
    ],
)
def test_what_torchrun_fails_with_is_one_line(error, message, monkeypatch, capsys):
    monkeypatch.setattr(command, "run_agent", Mock(side_effect=error))
    place = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=here:1 -m timeit"
    assert command.main(place.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


# ---- the agent, with stand-ins for ranks


def test_a_death_is_restarted_and_a_wrong_setting_then_ends_the_run_with_its_status(launch):
    (launch.folder / "stand_in.py").write_text(RANK)
    words = ["--nproc-per-node=2", "-m", "stand_in", "killed", "fails:64:error: x=1 is wrong"]
    done = launch.module("dist_amp.commands.launch", *words, timeout=60)
    assert done.returncode == 64, done.stderr
    assert done.stderr.splitlines() == [
        "restart 1 of 3: a rank ended without a report; did memory run out?",
        "error: x=1 is wrong",
    ]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def test_a_signal_is_passed_on_and_the_status_is_what_the_ranks_end_with(launch, tmp_path):
    (tmp_path / "stand_in.py").write_text(RANK)
    words = ["--nproc-per-node=2", "-m", "stand_in", "saves"]
    job = launch.start(0, *words, module="dist_amp.commands.launch")
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
    job = launch.start(0, *words, module="dist_amp.commands.launch")
    _, err = job.communicate(60)
    assert (job.returncode, err.count("\n")) == (1, 1)
    assert err.startswith("error: stopped by SIGTERM before all ranks had saved and exited")
    for path in tmp_path.glob("rank*"):
        assert not Path(f"/proc/{path.name[4:]}").exists()


def test_a_second_interrupt_kills_ranks_that_save_but_not_one_that_is_sent_twice(
    monkeypatch, tmp_path
):
    child = subprocess.Popen(["sleep", "60"])
    assert child.pid in elastic.children()
    child.kill()
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


def test_a_signal_while_machines_are_waited_for_ends_the_launcher_at_once(launch, request):
    words = "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    words += " --rdzv-conf=is_host=1 --local-addr=127.0.0.1 -m timeit"
    job = launch.start(0, *words.split(), module="dist_amp.commands.launch")
    request.addfinalizer(job.kill)
    output = job._output / "stdout"
    wait_for(lambda: output.exists() and "waits for" in output.read_text(), "the launcher", 60)
    time.sleep(1)  # until it is in the rendezvous; before, it would end as quickly
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(10)
    assert (job.returncode, err) == (1, "error: stopped by SIGTERM before any rank had started\n")


@pytest.mark.bad_input("a machine whose clock is an hour off, which torchrun takes for dead")
@pytest.mark.parametrize(
    ("nnodes", "refused"),
    [
        ("1", "the launcher .* is gone"),
        ("2", "all but 1 of --nnodes=2 machines while they joined"),
        ("1:4", ""),
        ("2:4", "all but 1 of --nnodes=2:4 machines while they joined"),
    ],
)
def test_a_rank_does_not_start_without_its_launcher_or_with_fewer_machines_than_asked_for(
    nnodes, refused, monkeypatch
):
    gone = subprocess.Popen(["true"])
    gone.wait()
    launcher = gone.pid if "gone" in refused else os.getpid()
    names = {"TORCHELASTIC_RUN_ID": "1", "DIST_AMP_LAUNCHER": str(launcher)}
    names |= {"GROUP_WORLD_SIZE": "1", "DIST_AMP_NNODES": nnodes}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Failure, match=refused) if refused else nullcontext():
        preflight.check_launch()
