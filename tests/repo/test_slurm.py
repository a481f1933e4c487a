"""launch/slurm.sbatch on a real Slurm: slurmctld and two slurmd on this machine, started and
stopped here.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from chaos import Chaos, as_options, differences, environment
from conftest import ROOT
from test_launch import ACTIVATED, WORDS, stand_ins

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


# ---- what becomes of a job, by its summary; commands of Slurm's are stand-ins ----


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


# ---- a Slurm ----


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
        """The number of a job, whose log is RUN.log."""
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
        """End all that was started, however far it came."""
        if len(self.daemons) > 1:
            self.ask("scancel", "--user=root", check=False)
            with suppress(AssertionError):
                wait_for(lambda: not self.ask("squeue", "--noheader", check=False), 300)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(300)
            except subprocess.TimeoutExpired:
                daemon.kill()


def wait_for(there, seconds=600.0):
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


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
