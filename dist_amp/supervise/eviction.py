"""Stops a run when its cloud is about to take a machine away: saved, as after a signal.

A thread of each machine's first rank asks the metadata service, once there is a step to save.
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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.request import HTTPHandler, OpenerDirector, Request

from dist_amp.distributed.process import LAUNCHER, in_thread
from dist_amp.errors import first_line
from dist_amp.run import Run
from dist_amp.supervise.lifecycle import Stop
from dist_amp.telemetry.step_report import LogRow, Observer

POLL_SECONDS = 2.0  # little of a notice of 30 s; AWS advises 5 s, Azure 1 s
ANSWER_SECONDS = 2.0  # the service is on the same host
SILENT_SECONDS = 30.0  # without a useful answer, before a warning
LONGEST_NOTICE = 900.0  # seconds; Azure's, of events that are no evictions
TOKEN_SECONDS = 21600  # the longest that AWS gives
DMI = Path("/sys/class/dmi/id")
UPLOADS = ".uploading/step_*"  # in a run's folder, while storage/mirror.py puts a checkpoint
# Of all three clouds. For a stand-in, DIST_AMP_METADATA in the environment replaces it.
ADDRESS = "http://169.254.169.254"
OPENER = OpenerDirector()
OPENER.add_handler(HTTPHandler())  # alone: no proxy, no redirection


@dataclass(frozen=True)
class Cloud:
    """dmi: a file, and a text that it has in this cloud alone. notice_seconds: the usual notice.

    read(body): the Unix time of an eviction, nan if it can't be read; None for no eviction.
    """

    dmi: tuple[str, str]
    path: str
    headers: Mapping[str, str]
    notice_seconds: float
    read: Callable[[str], float | None]
    token_path: str = ""


def read_azure(body: str) -> float | None:
    """Its other events are no evictions, and all machines of a scale set are told of all."""
    for event in json.loads(body)["Events"]:
        if event["EventType"] == "Preempt":
            status, name = ask(NAME_PATH, CLOUDS["azure"].headers)
            if status != 200 or name.strip() in event["Resources"]:
                return unix_time(event["NotBefore"])
    return None


def ask(path: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, str]:
    """The status and body of the service's answer. Errors: of many types."""
    request = Request(address() + path, headers=dict(headers), method=method)
    with OPENER.open(request, timeout=ANSWER_SECONDS) as response:
        return response.status, response.read(2**20).decode()


def address() -> str:
    return os.environ.get("DIST_AMP_METADATA", ADDRESS)


def unix_time(text: str) -> float:
    """Of an ISO date, or one as in HTTP; nan for anything else."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with suppress(ValueError, TypeError):
            return parse(text).timestamp()
    return math.nan


CLOUDS = {
    "aws": Cloud(
        dmi=("sys_vendor", "Amazon EC2"),
        path="/latest/meta-data/spot/instance-action",
        headers={},
        notice_seconds=120,
        read=lambda body: unix_time(json.loads(body)["time"]),
        token_path="/latest/api/token",
    ),
    "gcp": Cloud(
        dmi=("product_name", "Google Compute Engine"),
        path="/computeMetadata/v1/instance/preempted",
        headers={"Metadata-Flavor": "Google"},
        notice_seconds=30,
        read=lambda body: {"TRUE": time.time() + 30, "FALSE": None}[body.strip()],
    ),
    "azure": Cloud(
        dmi=("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"),  # not all of Hyper-V
        path="/metadata/scheduledevents?api-version=2020-07-01",
        headers={"Metadata": "true"},
        notice_seconds=30,
        read=read_azure,
    ),
}
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"  # Azure's


def recognised() -> str:
    """The cloud that this machine is in, "" for any other; asks no network."""
    for name, cloud in CLOUDS.items():
        with suppress(OSError):
            if cloud.dmi[1] in (DMI / cloud.dmi[0]).read_text(errors="replace"):
                return name
    return ""


@dataclass(eq=False)
class EvictionNotice(Observer):
    """Sets `stop.notice` on a rank of the machine; warns of saves that take longer than one."""

    run: Run
    stop: Stop
    name: str = ""  # of the cloud, on ranks that ask it
    _has_begun: bool = False
    _has_warned: bool = False
    _token: Mapping[str, str] = field(default_factory=dict)
    _token_until: float = -math.inf
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def after_step(self, *_: object) -> None:
        if self._has_begun or self.run.world.local_rank:
            return
        self._has_begun = True
        self.name = self.run.config.run.eviction_notice
        if self.name == "auto":
            self.name = recognised()
        if self.name:
            in_thread(self._watch, "eviction notice")

    def on_log(self, row: LogRow) -> None:
        began, ended = self.run.saved_between
        if self.name and ended and any(self.run.folder.glob(UPLOADS)):
            ended = time.monotonic()
        if self.name and ended - began > CLOUDS[self.name].notice_seconds and not self._has_warned:
            self._has_warned = True
            self.run.world.warn(
                f"a checkpoint takes {ended - began:.0f} s, longer than {self.name}'s notice of an "
                f"eviction, {CLOUDS[self.name].notice_seconds:g} s: use a faster run.dir, or "
                "lower checkpoint.every to the steps that may be lost"
            )

    def _watch(self) -> None:
        """Ask until there is a notice, or the run ends; a service that fails changes nothing."""
        warns_from = time.monotonic() + SILENT_SECONDS
        while self.stop.notice is None and not self._has_ended.is_set():
            try:
                self._ask(CLOUDS[self.name])
                warns_from = max(warns_from, time.monotonic() + SILENT_SECONDS)  # inf stays
            except Exception as error:
                self._token_until = -math.inf  # it may be refused
                if time.monotonic() >= warns_from and not self._has_ended.is_set():
                    warns_from = math.inf
                    self._warn(
                        f"run.eviction_notice={self.name} gets no useful answer from {address()} "
                        f"({first_line(error):.90}), and asks every {POLL_SECONDS:g} s; on other "
                        "machines use auto or off"
                    )
            self._has_ended.wait(POLL_SECONDS)

    def _ask(self, cloud: Cloud) -> None:
        if cloud.token_path and time.monotonic() > self._token_until:
            seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
            token = ask(cloud.token_path, seconds, "PUT")[1]
            self._token = {"X-aws-ec2-metadata-token": token}
            self._token_until = time.monotonic() + TOKEN_SECONDS / 2
        status, body = ask(cloud.path, {**cloud.headers, **self._token})
        if status == 404 and cloud.token_path:
            return
        if status != 200:
            raise ValueError(f"status {status}")
        if (at := cloud.read(body)) is not None:
            self.stop.notice = self._noticed(at, cloud.notice_seconds, body)
            if LAUNCHER in os.environ:  # it leaves; those of other nodes may continue
                os.kill(int(os.environ[LAUNCHER]), signal.SIGTERM)

    def _noticed(self, at: float, usual: float, body: str) -> tuple[float, str]:
        """The end by time.monotonic, and the cause of the stop in words."""
        seconds = at - time.time()
        if not 0 < seconds <= LONGEST_NOTICE:
            found = f"in {seconds:.0f} s by this machine's clock: check the clock"
            if seconds <= 0:
                found = f"{-seconds:.0f} s ago by this machine's clock: check the clock"
            if math.isnan(at):
                found = f"at a time that can't be read, {body!r:.300}"
            self._warn(
                f"{self.name} announces an eviction {found}; it is taken for the usual notice of "
                f"{usual:g} s"
            )
            seconds = usual
        when = datetime.fromtimestamp(time.time() + seconds, UTC)
        cause = f"{self.name}'s notice of an eviction at {when:%Y-%m-%dT%H:%M:%SZ} "
        cause += f"(rank {self.run.world.rank}, {socket.gethostname()}): {seconds:.0f} s of notice"
        self._warn(f"{cause}; stopping within a few steps")
        return time.monotonic() + seconds, cause

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr, flush=True)  # also on another rank than 0

    def __exit__(self, *error: object) -> None:
        """On all ranks, the earliest notice is the cause of the stop."""
        self._has_ended.set()
        if error[0] is not None or not self.stop.agreed or self.stop.by_task:
            return
        notice = None
        if self.stop.notice is not None:
            end, cause = self.stop.notice
            notice = (end - time.monotonic(), cause)
        if notices := sorted(filter(None, self.run.world.gather(notice))):
            self.stop.requested_by = notices[0][1]
