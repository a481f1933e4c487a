"""A cloud's notice of an eviction: as each cloud gives it, and what a run makes of it."""

import os
import re
import signal
import socket
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest
from forked import finish
from metadata_server import FAULTS, event, in_seconds, metadata_server
from test_train import TINY, summary_of, wait_for
from tiny import Slow, Tiny, make_run, watched

from dist_amp.supervise import eviction
from dist_amp.supervise.eviction import EvictionNotice, recognised
from dist_amp.supervise.stop import AgreedStop
from dist_amp.world import World


@pytest.fixture
def service(request, monkeypatch):
    """The stand-in of a cloud, by default AWS's, which is asked often and at once warned of."""
    with metadata_server(getattr(request, "param", "aws")) as server:
        monkeypatch.setenv("DIST_AMP_METADATA", server.address)
        monkeypatch.setattr(eviction, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(eviction, "SILENT_POLLS", 1)
        monkeypatch.setattr(eviction, "ANSWER_SECONDS", 10.0)  # a busy machine is slow
        yield server


@contextmanager
def watching(name, **world):
    """A run that asks the cloud."""
    run = make_run(None, Tiny(), "--run.eviction_notice", name)
    run.world = replace(run.world, **world)
    stop = AgreedStop(World())
    with watched(EvictionNotice(run, stop)):
        yield stop


def asks_again(service, times=3):
    """Wait until it has been asked so often from now on."""
    before = len(service.asked)
    wait_for(lambda: len(service.asked) >= before + times, "further requests")


@pytest.mark.parametrize("service", ["aws", "gcp", "azure"], indirect=True)
def test_a_notice_is_read_as_the_cloud_gives_it(service):
    with watching(service.cloud) as stop:
        asks_again(service)
        assert stop.requested_by == ""
        service.notice = in_seconds(service.cloud, 25)
        wait_for(lambda: stop.requested_by, "the notice")
    when = {"aws": r"at 20\S+Z", "gcp": "within 30 s", "azure": r"at \w{3}, .* GMT"}[service.cloud]
    place = re.escape(f"(rank 0, {socket.gethostname()})")
    assert re.fullmatch(
        f"{service.cloud}'s notice of an eviction {when} {place}", stop.requested_by
    )
    assert {*service.statuses} <= {200, 404}


DMI = {
    "aws": {"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"},
    "gcp": {"sys_vendor": "Google", "product_name": "Google Compute Engine"},
    "azure": {"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
    "": {"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "5911-0000-1234"},
    "a Chromebook": {"sys_vendor": "Google", "product_name": "Eve"},
    "a container": {},
}


@pytest.mark.parametrize("machine", DMI)
def test_auto_recognises_a_clouds_machine_by_its_dmi_files_and_asks_nothing_on_others(
    service, tmp_path, monkeypatch, machine
):
    for file, text in DMI[machine].items():
        (tmp_path / file).write_text(f"{text}\n")
    monkeypatch.setattr(eviction, "DMI", tmp_path)
    expected = machine if machine in eviction.MACHINES else ""
    assert recognised() == expected
    with watching("auto"):
        if expected:
            asks_again(service, 1)
    assert bool(service.asked) == bool(expected)


def test_the_launcher_of_the_machine_gets_a_signal_so_that_it_leaves_an_elastic_run(
    service, monkeypatch
):
    with subprocess.Popen(["sleep", "60"]) as launcher:
        monkeypatch.setenv("DIST_AMP_LAUNCHER", str(launcher.pid))
        with watching("aws"):
            asks_again(service)
            assert launcher.poll() is None
            service.notice = in_seconds("aws", 100)
            assert launcher.wait(60) == -signal.SIGTERM


def test_only_the_first_rank_of_a_machine_asks(service):
    with watching("aws", local_rank=1):
        pass
    with watching("off"):
        pass
    assert service.asked == []


# ---- bad inputs ----


@pytest.mark.bad_input("a metadata service that hangs, fails, redirects or answers with garbage")
@pytest.mark.parametrize(
    ("service", "fault"),
    # All are asked in one way; each reads the answer in its own.
    [*(("aws", fault) for fault in FAULTS), ("gcp", "garbage"), ("azure", "garbage")],
    indirect=["service"],
)
def test_a_service_that_fails_is_warned_of_once_and_asked_again(
    service, fault, monkeypatch, capsys
):
    if fault == "hangs":
        monkeypatch.setattr(eviction, "ANSWER_SECONDS", 0.2)
    service.fault = fault
    with watching(service.cloud) as stop:
        wait_for(lambda: sum(path.startswith("GET") for path in service.asked) > 2, "requests")
        assert stop.requested_by == ""
        service.fault = ""
        service.notice = in_seconds(service.cloud, 25)
        wait_for(lambda: stop.requested_by, "the notice")
    first, *others = capsys.readouterr().err.splitlines()
    assert f"eviction_notice={service.cloud} gets no useful answer from {service.address}" in first
    assert [line for line in others if "useful" in line] == []
    assert not [path for path in service.asked if "elsewhere" in path]


@pytest.mark.bad_input("a notice of a reboot or maintenance, or of another machine's eviction")
@pytest.mark.parametrize("service", ["azure"], indirect=True)
def test_other_events_and_evictions_of_other_machines_stop_nothing(service, capsys):
    soon = in_seconds("azure", 20)[0]["NotBefore"]
    kinds = ("Reboot", "Redeploy", "Freeze", "Terminate")
    service.notice = [event(kind, soon) for kind in kinds]
    service.notice.append(event("Preempt", soon, ["trainer_1"]))
    with watching("azure") as stop:
        asks_again(service, 6)
        assert stop.requested_by == ""
        service.notice.append(event("Preempt", soon, ["trainer_1", "trainer_0"]))
        wait_for(lambda: stop.requested_by, "the notice")
    assert "useful" not in capsys.readouterr().err


# ---- runs ----


class Evicted(Slow):
    """In a rank of a run that asks often."""


if "DIST_AMP_METADATA" in os.environ:
    eviction.POLL_SECONDS = 0.1


@pytest.mark.bad_input("an eviction under checkpoint.every = off")
@pytest.mark.parametrize(
    ("cloud", "nodes", "every", "status", "then"),
    [
        ("aws", 2, "1000", 75, "to continue, start"),
        ("gcp", 1, "off", 1, "checkpoint.every=off, so nothing was saved"),
    ],
)
def test_a_notice_to_the_last_machine_stops_all_which_save_what_they_may(
    launch, tmp_path, cloud, nodes, every, status, then
):
    """A rank on each of the machines, each with its own metadata service."""
    words = [*TINY, "--task.target", "test_eviction:Evicted", "--train.steps", "1000"]
    words += ["--run.dir", "run", "--run.eviction_notice", cloud, "--checkpoint.every", every]
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"LOCAL_RANK": "0", "WORLD_SIZE": str(nodes), "LOCAL_WORLD_SIZE": "1"}
    with metadata_server(cloud) as first, metadata_server(cloud) as last:
        last.notice = in_seconds(cloud, 100)
        started = []
        for rank in range(nodes):
            server = last if rank == nodes - 1 else first
            environ = place | {"RANK": str(rank), "DIST_AMP_METADATA": server.address}
            started.append(launch.start(0, *words, **environ))
        ended = [finish(process, 300) for process in started]
    assert [rank.returncode for rank in ended] == [status] * nodes, ended
    stopped = summary_of(tmp_path / "run")
    assert 0 < stopped["steps"] < 1000
    assert (stopped["stopped_by"], stopped["exit_code"]) == ("preempted", status)
    notice = rf"{cloud}'s notice of an eviction .* \(rank {nodes - 1}, {socket.gethostname()}\)"
    assert re.fullmatch(notice, stopped["cause"])
    closing = f"stopped after step {stopped['steps']} by {stopped['cause']}; {then}"
    assert closing in ended[0].stdout
    assert "stopping within a few steps" in ended[-1].stderr, "the machine's rank says so at once"
