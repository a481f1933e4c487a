"""launch/one_node.sh and many_nodes.sh as users start them: two hosts are two network namespaces on
this machine.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from chaos import LAYOUTS, Chaos, Process, as_options, differences
from conftest import ROOT

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


@pytest.fixture(scope="module")
def namespaces():
    """Not at import: what only collects the tests is to make no namespaces."""
    missing = [tool for tool in ("ip", "unshare", "sysctl") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"takes root; missing: {missing}; bash tests/engines.sh installs it")
    probe = f"dist_amp_probe_{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no network namespaces here: {tried.stderr.strip()}")
    ip("netns", "delete", probe)


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
NO_TORCHRUN = "torchrun is not on the PATH; activate the environment that has torch"


@needs_ip
@pytest.mark.bad_input("a machine without torchrun or `ip`; a wrong `NNODES` or `NODE_RANK`")
@pytest.mark.parametrize(
    ("script", "environ", "status", "told"),
    [
        ("one_node.sh", {"PATH": "/nowhere"}, 64, NO_TORCHRUN),
        ("many_nodes.sh", {"PATH": "/nowhere"}, 64, NO_TORCHRUN),
        ("many_nodes.sh", {"PATH": "{}"}, 64, "ip is missing; install iproute2"),
        ("many_nodes.sh", {"NNODES": "two"}, 64, "NNODES=two must be the number of machines, "),
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


# ---- one machine ----


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
    return Chaos(tmp_path_factory.mktemp("launch"), 0, **WORDS)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_one_node_needs_no_name_that_resolves_restarts_a_dead_rank_and_is_stopped_by_a_signal(
    chaos, request
):
    folder = chaos.new_folder()
    command = ["unshare", "--uts", "bash", "-c", 'hostname no.such.name; exec bash "$@"', "-"]
    command += [str(ROOT / "launch/one_node.sh"), *as_options(chaos.words)]
    environ = {"PATH": ACTIVATED, "NPROC_PER_NODE": "2"}
    job = Process(command, folder, environ)
    request.addfinalizer(job.process.kill)  # where it fails before its end; its ranks go with it
    job.wait_for("step     60")
    rank = int(subprocess.check_output(["pgrep", "--parent", str(job.process.pid), "--newest"]))
    os.kill(rank, signal.SIGKILL)
    job.wait_for("run    ", count=2)
    job.wait_for("step     80", count=1)
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75
    assert "by SIGUSR1; to continue, start the same job again with --run.dir run" in job.text
    assert Process(command, folder, environ).end() == 0
    assert differences(folder / "run", chaos.through()) == []


# ---- two machines ----


@pytest.fixture
def hosts(namespaces):
    """{host: its namespace}: "a" (10.213.0.1) and "b" (.2) on one wire; their names don't resolve.

    They share this disk. What runs on them ends with them, also where they came up halfway.
    """
    spaces = {host: f"dist_amp_{host}_{os.getpid()}" for host in "ab"}
    try:
        for space in spaces.values():
            ip("netns", "add", space)
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
def test_a_host_that_is_cut_off_is_named_on_both_sides_and_all_go_on_once_it_is_back(hosts, chaos):
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
