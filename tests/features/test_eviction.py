"""A cloud's notice of an eviction: as each cloud gives it, and what a run makes of it."""

import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from itertools import product

import pytest
from metadata_server import FAULTS, event, in_seconds, metadata_server
from test_train import TINY, summary_of, wait_for
from tiny import Slow, Tiny, make_run, watched

from dist_amp.supervise import eviction
from dist_amp.supervise.eviction import EvictionNotice, detect_cloud
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import main
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
def watching(cloud, **world):
    run = make_run(World(**world), Tiny(), "--run.eviction_notice", cloud)
    stop = AgreedStop(World())
    with watched(EvictionNotice(run, stop)):
        yield stop


def asks_again(service, times=3):
    """Wait until it has been asked so often from now on."""
    before = len(service.asked)
    wait_for(lambda: len(service.asked) >= before + times, "further requests")


WHEN = {"aws": r"at 20\S+Z", "gcp": "within 30 s", "azure": r"at \w{3}, .* GMT"}


@pytest.mark.bad_input("a metadata service that hangs, fails, redirects or answers with garbage")
@pytest.mark.parametrize(
    ("service", "fault"),
    # All are asked in one way; each gives and reads the answer in its own.
    [*product(WHEN, ("", "garbage")), *(("aws", fault) for fault in FAULTS if fault != "garbage")],
    indirect=["service"],
)
def test_a_notice_is_read_as_the_cloud_gives_it_after_a_failure_that_is_warned_of_once(
    service, fault, monkeypatch, capsys
):
    if fault == "hangs":
        monkeypatch.setattr(eviction, "ANSWER_SECONDS", 0.2)
    service.fault = fault
    with watching(service.cloud) as stop:
        asks_again(service, 5)
        assert stop.requested_by == ""
        service.fault = ""
        service.notice = in_seconds(service.cloud, 25)
        wait_for(lambda: stop.requested_by, "the notice")
    place = re.escape(f"(rank 0, {socket.gethostname()})")
    notice = f"{service.cloud}'s notice of an eviction {WHEN[service.cloud]} {place}"
    assert re.fullmatch(notice, stop.requested_by)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "no useful" in line]
    said = f"eviction_notice={service.cloud} gets no useful answer from {service.address}"
    assert [said in line for line in warnings] == [True] * bool(fault)
    assert fault or {*service.statuses} <= {200, 404}
    assert not [path for path in service.asked if "elsewhere" in path]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "5911-0000-1234"}, ""),
        ({"sys_vendor": "Google", "product_name": "a Chromebook"}, ""),
        ({}, ""),  # as in a container
    ],
)
def test_auto_recognises_a_clouds_machine_by_its_dmi_files_and_asks_nothing_on_others(
    service, tmp_path, monkeypatch, files, expected
):
    for file, text in files.items():
        (tmp_path / file).write_text(f"{text}\n")
    monkeypatch.setattr(eviction, "DMI", tmp_path)
    assert detect_cloud() == expected
    with watching("auto", local_rank=1):
        time.sleep(0.1)
    assert service.asked == [], "only the first rank of a machine asks"
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


@pytest.mark.bad_input("a notice of a reboot or maintenance, or of another machine's eviction")
@pytest.mark.parametrize("service", ["azure"], indirect=True)
def test_other_events_and_evictions_of_other_machines_stop_nothing(service, capsys):
    service.notice = [event("Reboot", "soon"), event("Preempt", "soon", ["trainer_1"])]
    with watching("azure") as stop:
        asks_again(service, 6)
        assert stop.requested_by == ""
        service.notice.append(event("Preempt", "soon", ["trainer_1", "trainer_0"]))
        wait_for(lambda: stop.requested_by, "the notice")
    assert "useful" not in capsys.readouterr().err


class Evicted(Slow):
    """The notice comes in the first step."""

    service = None

    def loss_sum(self, model, batch):
        self.service.notice = in_seconds("aws", 100)
        return super().loss_sum(model, batch)


@pytest.mark.bad_input("an eviction under checkpoint.every = off")
@pytest.mark.parametrize(
    ("every", "status", "then"),
    [
        ("1000", 75, "to continue, start"),
        ("off", 1, "checkpoint.every=off, so nothing was saved"),
    ],
)
def test_a_notice_stops_the_run_which_saves_what_it_may(
    service, tmp_path, monkeypatch, capfd, every, status, then
):
    monkeypatch.setattr(Evicted, "service", service)
    words = [*TINY, "--task.target", "test_eviction:Evicted", "--train.steps", "1000"]
    words += ["--run.eviction_notice", "aws", "--checkpoint.every", every]
    assert main([*words, "--run.dir", f"{tmp_path}/run"]) == status
    stopped = summary_of(tmp_path / "run")
    assert 0 < stopped["steps"] < 1000
    assert (stopped["stopped_by"], stopped["exit_code"]) == ("preempted", status)
    assert stopped["cause"].startswith("aws's notice of an eviction at ")
    said, warned = capfd.readouterr()
    assert f"stopped after step {stopped['steps']} by {stopped['cause']}; {then}" in said
    assert "stopping within a few steps" in warned, "the machine's rank says so at once"
