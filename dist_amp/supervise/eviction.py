"""Saves and stops a run, as a signal does, if its cloud is about to evict one of its machines.

On each machine, a thread of the first local rank polls the cloud's metadata service. A notice to
one machine stops all ranks after the same step (stop.py); summary.json has it as the cause.
Protocols: AWS, "Spot Instance interruption notices"; Google, "Create and use preemptible VMs";
Azure, "Scheduled Events for Linux VMs".

Docs: docs/launching.md
"""

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from urllib.request import HTTPHandler, OpenerDirector, Request

from dist_amp.distributed.process import LAUNCHER, in_thread
from dist_amp.errors import first_line
from dist_amp.run import Run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.observer import Observer

POLL_SECONDS = 2.0  # a small part of the 30 s that a notice gives; AWS advises 5 s, Azure 1 s
ANSWER_SECONDS = 2.0  # timeout of a request; the service is on the same host
SILENT_POLLS = 15  # failed polls in a row before a warning
DMI = Path("/sys/class/dmi/id")
MACHINES = {  # {cloud: (a file in DMI, a text that the file contains in this cloud only)}
    "aws": ("sys_vendor", "Amazon EC2"),
    "gcp": ("product_name", "Google Compute Engine"),
    "azure": ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),  # not on other Hyper-V
}
ADDRESS = "http://169.254.169.254"  # the metadata service of all three clouds
OPENER = OpenerDirector()
OPENER.add_handler(HTTPHandler())  # the only handler, so it uses no proxy and follows no redirect


def detect_cloud() -> str:
    """The cloud that this machine belongs to, or ""; reads local files only."""
    for cloud, (file, text) in MACHINES.items():
        with suppress(OSError):
            if text in (DMI / file).read_text(errors="replace"):
                return cloud
    return ""


def endpoint() -> str:
    """The URL of the metadata service, or that of a fake service in tests."""
    return os.environ.get("DIST_AMP_METADATA", ADDRESS)


def fetch(path: str, headers: dict[str, str], method: str = "GET") -> str:
    """The body of the service's response, "" for a 404. Raises errors of many types otherwise."""
    request = Request(endpoint() + path, headers=headers, method=method)
    with OPENER.open(request, timeout=ANSWER_SECONDS) as response:
        if response.status == 404:
            return ""
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return str(response.read(2**20).decode())


def eviction_time(cloud: str) -> str:
    """When this machine will be evicted, as text; "" if no eviction is planned."""
    if cloud == "aws":
        token = fetch("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        path = "/latest/meta-data/spot/instance-action"
        body = fetch(path, {"X-aws-ec2-metadata-token": token})
        return f"at {json.loads(body)['time']}" if body else ""
    if cloud == "gcp":
        body = fetch("/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return {"TRUE": "within 30 s", "FALSE": ""}[body.strip()]
    headers = {"Metadata": "true"}
    body = fetch("/metadata/scheduledevents?api-version=2020-07-01", headers)
    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    for event in json.loads(body)["Events"]:
        # Other types are no evictions; machines of a scale set also see one another's events.
        if event["EventType"] == "Preempt" and fetch(name, headers).strip() in event["Resources"]:
            return f"at {event['NotBefore'] or 'any moment'}"
    return ""


class EvictionNotice(Observer):
    """Requests a stop of the run when a notice comes; polls on each machine's first rank."""

    def __init__(self, run: Run, stop: AgreedStop):
        self._run = run
        self._stop = stop
        self._closed = threading.Event()
        setting = run.config.run.eviction_notice
        cloud = detect_cloud() if setting == "auto" else setting
        if cloud and not run.world.local_rank:
            in_thread(lambda: self._watch(cloud), "eviction notice")

    def _watch(self, cloud: str) -> None:
        """Poll until a notice comes or the run ends; errors of the service cause only a warning."""
        failures = 0
        while not self._closed.wait(POLL_SECONDS):
            when = ""
            try:
                when = eviction_time(cloud)
                failures = 0
            except Exception as error:
                failures += 1
                if failures == SILENT_POLLS:
                    warn(
                        f"run.eviction_notice={cloud} gets no useful answer from {endpoint()} "
                        f"({first_line(error):.90}), and asks every {POLL_SECONDS:g} s; on other "
                        "machines use auto or off"
                    )
            if when:
                place = f"rank {self._run.world.rank}, {socket.gethostname()}"
                cause = f"{cloud}'s notice of an eviction {when} ({place})"
                warn(f"{cause}; stopping within a few steps")
                self._stop.requested_by = self._stop.requested_by or cause
                if LAUNCHER in os.environ:  # this node's launcher leaves; other nodes may continue
                    os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)
                return

    def close(self, error: BaseException | None = None) -> None:
        self._closed.set()


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)  # not only on rank 0
