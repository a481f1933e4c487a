"""launch/one_node.sh, many_nodes.sh and slurm.sbatch.

Two hosts are two network namespaces on this machine; slurmctld and two slurmd are started and
stopped here.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from chaos import LAYOUTS, Chaos, Process, as_options, differences, environment
from conftest import ROOT
from test_train import wait_for

WORDS = {
    "train.steps": 150,
    "metrics.log_every": 10,
    "eval.every": 50,
    "run.timeout_seconds": 10,
    **LAYOUTS["ddp"],
}
ACTIVATED = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as a user's shell has it


def ip(*words):
    subprocess.run(["ip", *words], check=True)


# ---- what the scripts check and start; commands are stand-ins ----


def stand_ins(folder, **scripts):
    """A PATH on which these commands are shell scripts."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{ACTIVATED}"


def start(script, *words, **environ):
    """(status, its output, the last line of its errors) of a script on machine 1 of 2."""
    place = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "NPROC_PER_NODE": "1"}
    environ = {"PATH": ACTIVATED, **place, **environ}
    command = ["/bin/bash", ROOT / "launch" / script, *words]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


needs_ip = pytest.mark.skipif(shutil.which("ip") is None, reason="ip (iproute2) is not there")
NO_TORCHRUN = "torchrun is not on the PATH"


@needs_ip
@pytest.mark.bad_input("a machine without torchrun or `ip`; a wrong `NNODES` or `NODE_RANK`")
@pytest.mark.parametrize(
    ("script", "environ", "status", "told"),
    [
        ("one_node.sh", {"PATH": "/nowhere"}, 64, NO_TORCHRUN),
        ("many_nodes.sh", {"PATH": "{}"}, 64, "ip is missing; install iproute2"),
        ("many_nodes.sh", {"NODE_RANK": "2"}, 64, "NODE_RANK=2 must be this machine's number, fr"),
        ("many_nodes.sh", {"MASTER_ADDR": "a.invalid"}, 1, "MASTER_ADDR=a.invalid must be an addr"),
    ],
)
def test_a_machine_that_lacks_something_or_a_wrong_place_of_it_is_refused(
    script, environ, status, told, tmp_path
):
    stand_ins(tmp_path, torchrun="")
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    found, _, error = start(script, **environ)
    assert found == status
    assert error.startswith(f"error: {told}")


@pytest.mark.bad_input("a rendezvous where nothing listens, or whose port is in use")
@needs_ip
def test_a_rendezvous_at_which_nobody_answers_or_whose_port_is_in_use_is_named(tmp_path):
    path = stand_ins(tmp_path, python3="")  # the settings are right
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        told = f"error: MASTER_PORT={port} on 127.0.0.1 is in use; choose another"
        assert start("many_nodes.sh", NODE_RANK="0", MASTER_PORT=port) == (1, "", told)
    status, _, error = start("many_nodes.sh", PATH=path, MASTER_PORT=port, RDZV_TIMEOUT="1")
    told = f"error: nothing answers at 127.0.0.1:{port} in 1 s; start machine 0, or open the port"
    assert (status, error) == (1, told)


@needs_ip
def test_wrong_settings_end_each_script_with_their_status_before_any_rank_starts(tmp_path):
    path = stand_ins(tmp_path, python3='echo "$*"; exit 64')
    words = "-m dist_amp.launch --nproc-per-node=1 --max-restarts=3 --a.b 1\n"
    assert start("one_node.sh", "--a.b", "1", PATH=path) == (64, words, "")
    many = start("many_nodes.sh", "--a.b", "1", PATH=path, RDZV_TIMEOUT="1")
    assert many == (64, "", "")


def test_a_machine_0_whose_own_name_is_127_0_1_1_gives_the_others_an_address_that_they_reach(
    tmp_path,
):
    """As Debian's /etc/hosts has it."""
    path = stand_ins(
        tmp_path,
        getent="echo 127.0.1.1",
        hostname="echo 10.213.0.1 10.214.0.1",
        ip='echo "1 wire src 10.213.0.1 uid 0 $*"',
        timeout="exit 1",  # nothing listens at machine 0's port
        python3='echo "$GLOO_SOCKET_IFNAME $*"',
        torchrun="",
    )
    status, told, _ = start("many_nodes.sh", PATH=path, NODE_RANK="0", MASTER_ADDR="node0")
    assert status == 0
    assert "machine 0 of 2 (10.213.0.1): " in told
    assert "\nwire -m dist_amp.launch " in told
    assert "--local-addr=10.213.0.1 " in told


# ---- two machines ----


@pytest.fixture
def hosts():
    """{host: its namespace}: "a" (10.213.0.1) and "b" (.2) on one wire; their names don't resolve.

    They share this disk. What runs on them ends with them, also where they came up halfway.
    """
    missing = [tool for tool in ("ip", "unshare", "sysctl") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"takes root; missing: {missing}; bash tests/engines.sh installs it")
    spaces = {host: f"dist_amp_{host}_{os.getpid()}" for host in "ab"}
    try:
        for space in spaces.values():
            added = subprocess.run(["ip", "netns", "add", space], capture_output=True, text=True)
            if added.returncode:
                pytest.skip(f"no network namespaces here: {added.stderr.strip()}")
            ip("-n", space, "link", "set", "lo", "up")
        ip(*"link add wire netns {a} type veth peer wire netns {b}".format(**spaces).split())
        for number, space in enumerate(spaces.values(), start=1):
            ip("-n", space, "address", "add", f"10.213.0.{number}/24", "dev", "wire")
            ip("-n", space, "link", "set", "wire", "up")
        yield spaces
    finally:
        for space in spaces.values():
            inside = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in inside.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


@pytest.mark.engine
@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_on_both_sides_and_all_go_on_once_it_is_back(
    hosts, tmp_path
):
    chaos = Chaos(tmp_path, 0, **WORDS)
    folder = chaos.new_folder()
    place = {"NNODES": "2", "MASTER_ADDR": "10.213.0.1", "PATH": ACTIVATED, "NPROC_PER_NODE": "1"}
    jobs = []
    for number, (host, space) in enumerate(hosts.items()):
        command = f"ip netns exec {space} unshare --uts bash -c".split()
        command += [f'hostname host-{host}; exec bash "$@"', "-"]
        command += [str(ROOT / "launch/many_nodes.sh"), *as_options(chaos.words)]
        jobs.append(Process(command, folder, place | {"NODE_RANK": str(number)}))
    a, b = jobs
    a.wait_for("step     60")
    ip("-n", hosts["b"], "link", "set", "wire", "down")
    a.wait_for("error: rank 1 (process")  # both are named while the wire is still down
    b.wait_for("error: rank 0 (process")
    lost = "did not take part in a collective in time|gave no sign of life"
    assert re.search(rf"on host-b\) ({lost})", a.text)
    assert "on host-a) and the store on its machine at 10.213.0.1:" in b.text
    ip("-n", hosts["b"], "link", "set", "wire", "up")
    assert [a.end(), b.end()] == [0, 0], f"{a.text[-3000:]}\n{b.text[-3000:]}"
    assert "resumed from step" in a.text
    assert differences(folder / "run", chaos.through()) == []


# ---- Slurm ----

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs={cores}
NodeName=n2 NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES
"""


def submit_to_stand_ins(folder, summary, requeue="true", **environ):
    """(status, lines) of a job whose run leaves such a summary behind, or none."""
    run = folder / "run"
    show = "echo '   NodeAddr=10.213.0.1 NodeHostName=n1'"
    leave = summary and f"echo '{json.dumps(summary, indent=2)}' >{run}/summary.json"
    scripts = {
        "srun": f"sleep 0.1; {leave or 'true'}; env; exit 1",
        "scontrol": f'if [ "$1" = requeue ]; then echo requeue; {requeue}; else {show}; fi',
    }
    environ |= {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1", "RUN_DIR": str(run)}
    environ["PATH"] = stand_ins(folder, **scripts)
    command = ["/bin/bash", ROOT / "launch/slurm.sbatch"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout.splitlines()


QUEUED = "job 42 was stopped and saved; it is queued again"
TOO_SHORT = "job 42 was stopped before its first step and is not queued again; give it more --time"
REFUSED = "job 42 was stopped and saved, but not queued again; continue with RUN_DIR={} sbatch ..."


@pytest.mark.parametrize(
    ("steps", "before", "requeue", "status", "told"),
    [
        (20, 10, "true", 0, QUEUED),
        (20, None, "true", 0, QUEUED),
        (0, None, "true", 1, TOO_SHORT),  # else it would be queued for ever
        (20, 20, "true", 1, TOO_SHORT),
        (20, 10, "false", 1, REFUSED),  # as a cluster may be set
    ],
)
def test_a_job_that_was_saved_after_some_steps_is_queued_again(
    tmp_path, steps, before, requeue, status, told
):
    summary = {"exit_code": 75, "steps": steps, "resumed_from_step": before}
    found, lines = submit_to_stand_ins(tmp_path, summary, requeue)
    assert (found, lines[-1]) == (status, told.format(tmp_path / "run"))
    assert ("requeue" in lines) == (told != TOO_SHORT)


def test_a_job_that_fails_is_not_queued_again_and_has_its_own_number_of_nodes_and_time_to_save(
    tmp_path,
):
    (tmp_path / "run").mkdir()  # of a run that was stopped
    (tmp_path / "run/summary.json").write_text('{\n  "exit_code": 75,\n  "steps": 20\n}\n')
    os.utime(tmp_path / "run/summary.json", (0, 0))
    status, lines = submit_to_stand_ins(tmp_path, None, NNODES="4", NODE_RANK="3")
    assert (status, "requeue" in lines) == (1, False)
    assert not [line for line in lines if line.startswith(("NNODES=", "NODE_RANK="))]
    assert {"MASTER_ADDR=10.213.0.1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280"} <= set(lines)


def free_ports(count):
    with ExitStack() as sockets:
        opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        return [sockets.enter_context(one).getsockname()[1] for one in opened]


class Slurm:
    """A cluster of two nodes with other numbers of cores; all its files are in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons = []
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def open(self):
        folder = self.folder
        words = {"host": socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
        config = CONFIG.format(folder=folder, ports=free_ports(3), **words)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(config)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        munge.append(f"--socket={folder}/munge.socket")
        self.daemon("munged", "--force", "--foreground", *munge)
        wait_for((folder / "munge.socket").exists)
        self.daemon("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self.daemon("slurmd", "-D", "-N", node)
        ask = ("sinfo", "--noheader", "--format=%T %D")
        wait_for(lambda: self.ask(*ask, check=False) == "idle 2\n")

    def daemon(self, *command):
        log = (self.folder / "daemons.log").open("a")
        self.daemons.append(subprocess.Popen(command, env=self.environ, stdout=log, stderr=log))

    def ask(self, *command, check=True, **environ):
        options = {"capture_output": True, "text": True, "check": check}
        return subprocess.run(command, env={**self.environ, **environ}, **options).stdout

    def submit(self, run, words):
        options = [f"--chdir={ROOT}", f"--output={run}.log", "--gpus-per-node=0", "--time=10"]
        settings = as_options({key: value for key, value in words.items() if key != "run.dir"})
        environ = {"PATH": ACTIVATED, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "RUN_DIR": str(run)}
        environ |= {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "RDZV_TIMEOUT": "60"}
        environ["MASTER_PORT"] = str(free_ports(1)[0])
        script = str(ROOT / "launch/slurm.sbatch")
        return self.ask("sbatch", *options, script, *settings, **environ).split()[-1]

    def has(self, job):
        """What Slurm has of a job: {"JobState": "RUNNING", ...}."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def end(self, job):
        """The state in which a job ends: "COMPLETED", "FAILED"."""
        wait_for(lambda: self.has(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"))
        return self.has(job)["JobState"]

    def close(self):
        if len(self.daemons) > 1:
            self.ask("scancel", "--user=root", check=False)
            with suppress(AssertionError):
                wait_for(lambda: not self.ask("squeue", "--noheader", check=False), seconds=300)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(300)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.fixture(scope="module")
def slurm():
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
    missing = [name for name in programs if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"slurmd takes root; missing: {missing}; bash tests/engines.sh installs it")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # a short path, as for sockets
        made = Slurm(Path(folder))
        try:
            made.open()
            yield made
        finally:
            made.close()


def affinities(job):
    """The cores of each rank of a job."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = {pid: environment(pid) for pid in pids}
    ranks = [pid for pid in pids if "RANK" in found[pid] and found[pid].get("SLURM_JOB_ID") == job]
    return [os.sched_getaffinity(pid) for pid in ranks]


@pytest.mark.engine
@pytest.mark.slow
def test_a_job_that_is_signalled_is_saved_queued_again_and_ends_bit_identical(slurm, tmp_path):
    chaos = Chaos(tmp_path / "chaos", 0, **WORDS | {"run.timeout_seconds": 60})
    run = tmp_path / "run"
    log = tmp_path / "run.log"
    job = slurm.submit(run, chaos.words)
    wait_for(lambda: log.exists() and "step     60" in log.read_text())
    assert affinities(job) == [os.sched_getaffinity(0)] * 2
    slurm.ask("scancel", "--signal=USR1", job)  # as --signal does before the limit: to srun's tasks
    wait_for(lambda: slurm.has(job)["JobState"] == "PENDING")
    assert "by SIGUSR1; to continue, start the same job again with" in log.read_text()
    assert slurm.has(job)["Restarts"] == "1"
    time.sleep(2)  # a node refuses a start in the second in which it ended the job
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # else in two minutes
    assert slurm.end(job) == "COMPLETED", log.read_text()[-3000:]
    assert "resumed from step" in log.read_text()
    assert differences(run, chaos.through()) == []
