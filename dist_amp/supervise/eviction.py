"""Stops a run when its cloud is about to take a machine away: saved, as after a signal.

A thread of each machine's first rank asks the metadata service, once there is a step to save. A
notice makes all ranks stop at the same step; the earliest one is the cause of the stop.
Protocols: AWS, "Spot Instance interruption notices"; Google, "Create and use preemptible VMs";
Azure, "Scheduled Events for Linux VMs".

Docs: docs/launching.md
"""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.request import HTTPHandler, OpenerDirector, Request

from dist_amp.distributed.process import LAUNCHER, in_thread
from dist_amp.errors import first_line
from dist_amp.run import Run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.observer import Observer

POLL_SECONDS = 2.0  # little of a notice of 30 s; AWS advises 5 s, Azure 1 s
ANSWER_SECONDS = 2.0  # the service is on the same host
SILENT_SECONDS = 30.0  # without a useful answer, before a warning
USUAL_NOTICE = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}  # seconds
LONGEST_NOTICE = 900.0  # seconds; Azure's, of events that are no evictions
DMI = Path("/sys/class/dmi/id")
MACHINES = {  # cloud: (a file of DMI, a text that it has in this cloud alone)
    "aws": ("sys_vendor", "Amazon EC2"),
    "gcp": ("product_name", "Google Compute Engine"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),  # not all of Hyper-V
}
# Of all three clouds. For a stand-in, DIST_AMP_METADATA in the environment replaces it.
ADDRESS = "http://169.254.169.254"
OPENER = OpenerDirector()
OPENER.add_handler(HTTPHandler())  # alone: no proxy, no redirection


def recognised() -> str:
    """The cloud that this machine is in, "" for any other; asks no network."""
    for cloud, (file, text) in MACHINES.items():
        with suppress(OSError):
            if text in (DMI / file).read_text(errors="replace"):
                return cloud
    return ""


def address() -> str:
    return os.environ.get("DIST_AMP_METADATA", ADDRESS)


def ask(path: str, headers: dict[str, str], method: str = "GET", absent: str | None = None) -> str:
    """The service's answer; `absent` in place of a 404. Errors: of many types."""
    request = Request(address() + path, headers=headers, method=method)
    with OPENER.open(request, timeout=ANSWER_SECONDS) as response:
        if response.status == 404 and absent is not None:
            return absent
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return response.read(2**20).decode()


def eviction_at(cloud: str) -> float | None:
    """The Unix time of an eviction, nan if it can't be read; None for no eviction."""
    if cloud == "aws":
        token = ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        path = "/latest/meta-data/spot/instance-action"
        body = ask(path, {"X-aws-ec2-metadata-token": token}, absent="")
        return unix_time(json.loads(body)["time"]) if body else None
    if cloud == "gcp":
        body = ask("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return {"TRUE": time.time() + USUAL_NOTICE["gcp"], "FALSE": None}[body.strip()]
    headers = {"Metadata": "true"}
    body = ask("/metadata/scheduledevents?api-version=2020-07-01", headers)
    for event in json.loads(body)["Events"]:
        # Other events are no evictions, and all machines of a scale set are told of all.
        if event["EventType"] == "Preempt":
            name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            with suppress(OSError, ValueError):  # a machine that does not know its name stops
                if ask(name, headers).strip() not in event["Resources"]:
                    continue
            return unix_time(event["NotBefore"])
    return None


def unix_time(text: str) -> float:
    """From an ISO date, or one as in HTTP; nan for anything else."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError, TypeError):
            return parse(text).timestamp()
    return math.nan


class EvictionNotice(Observer):
    """Tells `stop` of a notice, on a rank of the machine."""

    def __init__(self, run: Run, stop: AgreedStop):
        self._run = run
        self._stop = stop
        self._has_ended = threading.Event()

    def after_step(self, *_: object) -> None:
        self._run.observers.rest(self)
        if self._run.world.local_rank:
            return
        setting = self._run.config.run.eviction_notice
        cloud = recognised() if setting == "auto" else setting
        if cloud:
            in_thread(lambda: self._watch(cloud), "eviction notice")

    def _watch(self, cloud: str) -> None:
        """Ask until there is a notice, or the run ends; a service that fails changes nothing."""
        warns_from = time.monotonic() + SILENT_SECONDS
        while not self._has_ended.is_set():
            try:
                at = eviction_at(cloud)
                warns_from = max(warns_from, time.monotonic() + SILENT_SECONDS)  # inf stays
            except Exception as error:
                at = None
                if time.monotonic() >= warns_from and not self._has_ended.is_set():
                    warns_from = math.inf
                    _warn(
                        f"run.eviction_notice={cloud} gets no useful answer from {address()} "
                        f"({first_line(error):.90}), and asks every {POLL_SECONDS:g} s; on other "
                        "machines use auto or off"
                    )
            if at is not None:
                self._stop.announce(*self._noticed(cloud, at))
                if LAUNCHER in os.environ:  # it leaves; those of other nodes may continue
                    os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
                return
            self._has_ended.wait(POLL_SECONDS)

    def _noticed(self, cloud: str, at: float) -> tuple[float, str]:
        """The end by time.monotonic, and the cause of the stop in words."""
        seconds = at - time.time()
        if not 0 < seconds <= LONGEST_NOTICE:
            when = f"in {seconds:.0f} s by this machine's clock: check the clock"
            if math.isnan(at):
                when = "at a time that can't be read"
            seconds = USUAL_NOTICE[cloud]
            _warn(
                f"{cloud} announces an eviction {when}; it is taken for the usual notice of "
                f"{seconds:g} s"
            )
        when = f"{datetime.fromtimestamp(time.time() + seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
        cause = f"{cloud}'s notice of an eviction at {when} (rank {self._run.world.rank}, "
        cause += f"{socket.gethostname()}): {seconds:.0f} s of notice"
        _warn(f"{cause}; stopping within a few steps")
        return time.monotonic() + seconds, cause

    def close(self, error: BaseException | None = None) -> None:
        """On all ranks, the earliest notice is the cause of the stop."""
        self._has_ended.set()
        if error is not None or not self._stop.agreed or self._stop.by_task:
            return
        notice = None
        if self._stop.notice is not None:
            end, cause = self._stop.notice
            notice = (end - time.monotonic(), cause)
        if notices := sorted(filter(None, self._run.world.gather(notice))):
            self._stop.name_cause(notices[0][1])


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)  # also on another rank than 0
