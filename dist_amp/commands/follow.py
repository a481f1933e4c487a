"""python -m dist_amp.follow RUN --to wandb|trackio|mlflow: send a run's metrics to a tracker, from
beside the run.

It reads the run's folder while the run trains, until the run ends, or afterwards; --once sends what
exists and ends. The run itself imports no tracker and never waits for one. What was sent is kept in
RUN/follow_TRACKER.json: start the same command again after any stop, of the run or of this command,
and it continues in the same run of the tracker.

The configuration is sent at the start, metrics by step under the same tags as in TensorBoard, those
of each rank as rank00000/TAG (up to 64 ranks), and the summary and the sample at the end. Server,
login and offline mode are set as the tracker documents it: WANDB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID ... See docs/trackers.md.

Exit status: 0 all is sent, 64 bad arguments, no package or no login, 65 not a run's folder, 75
stopped by a signal, 1 anything else.
"""

import json
import os
import re
import secrets
import signal
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dist_amp.commands.followed_run import (
    CONFIG,
    METRICS,
    MetricsFile,
    clean,
    earlier_attempt,
    flat,
    has_ended,
    hash_of,
    read_summary,
    shows_ranks,
    wait_for_run,
)
from dist_amp.commands.trackers import TRACKERS, Tracker
from dist_amp.distributed.signals import handle_signals
from dist_amp.errors import SAVED_AND_STOPPED, ConfigError, DataError, Failure, first_line
from dist_amp.files import InUse, only_process, write_durably
from dist_amp.supervise.command_line import Parser, exit_status

POLL_SECONDS = 1.0
APPEARS_SECONDS = 120.0  # to wait for a run that was started at the same time


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    return exit_status(run, argv)


def run(argv: Sequence[str]) -> int:
    parser = Parser("python -m dist_amp.follow", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--to", required=True, choices=list(TRACKERS), help="the tracker")
    parser.add_argument("--project", default="", help="its project or experiment (dist_amp)")
    parser.add_argument("--once", action="store_true", help="send what exists now, and end")
    options = parser.parse_args(argv)
    folder = options.run.resolve()
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once

    with handle_signals(on_signal, (signal.SIGINT, signal.SIGTERM)):
        seconds = 0.0 if options.once else APPEARS_SECONDS
        wait_for_run(folder, seconds, stop)
        with only_follower(folder, options.to):
            return Follower(folder, options.to, options.project).follow(options.once, stop)


@contextmanager
def only_follower(folder: Path, tracker: str) -> Iterator[None]:
    """Lock the position, so that nothing is sent twice. Errors: Failure if another process has it,
    or no one can.
    """
    path = folder / f".follow_{tracker}.lock"
    try:
        with only_process(path):
            yield
    except InUse as error:
        raise Failure(
            f"{folder} is followed to {tracker} by another process already ({error}); stop that "
            "one first"
        ) from error
    except PermissionError as error:
        raise Failure(
            f"{path} can't be written ({error.strerror}): follow keeps what was sent in the run's "
            "folder; copy the folder, or allow writing there"
        ) from error


@dataclass
class Position:
    """What a tracker has got, kept in RUN/follow_TRACKER.json."""

    id: str  # of the tracker's run
    project: str
    earlier: str = ""  # see `earlier_attempt`
    lines: int = 0
    sent: dict[str, int] = field(default_factory=dict)  # the last step of each tag
    summary: str = ""  # hash of the summary that was sent

    def unsent(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The line's values that were not sent yet.

        Each tag's steps rise in the file. A resumed run takes steps again: what was sent of them
        stays.
        """
        unsent = {}
        for tag, value in line.items():
            is_tag = tag not in ("step", "unix_time")
            if is_tag and line["step"] > self.sent.get(clean(tag), -1):
                unsent[tag] = value
        return unsent

    def count(self, line: Mapping[str, Any]) -> None:
        """Note that a line was sent."""
        self.sent |= {clean(tag): line["step"] for tag in self.unsent(line)}
        self.lines += 1


class Follower:
    """Sends one run's folder to one tracker."""

    def __init__(self, folder: Path, tracker: str, project: str):
        self.folder = folder
        self.name = tracker
        self.file = MetricsFile(folder / METRICS)
        self.path = folder / f"follow_{tracker}.json"
        self.tracker: Tracker | None = None
        self.saved = ""
        self.position = self.load(project)

    def follow(self, once: bool, stop: threading.Event) -> int:
        """Send lines until the run has ended; returns the exit status."""
        while not stop.is_set():
            # First: a run's last lines are written before its summary.
            summary = read_summary(self.folder)
            lines = self.new_lines()
            over = once or (summary is not None and has_ended(self.folder, summary))
            if lines or not over or hash_of(summary) != self.position.summary:
                self.send(lines, stop)
            if over and not stop.is_set():
                return self.end(summary)
            stop.wait(POLL_SECONDS)
        if self.tracker is not None:
            self.tracker.close()
            self.save()
        count = self.position.lines
        print(f"stopped after {count} lines; start the same command again to continue", flush=True)
        return SAVED_AND_STOPPED

    def new_lines(self) -> list[dict[str, Any]]:
        """The lines with anything unsent; a run that has started again from step 0 is another one
        for the tracker.
        """
        earlier = earlier_attempt(self.folder)
        if earlier != self.position.earlier:
            print(
                f"{self.folder} has started again from step 0: this is a new run in {self.name}",
                flush=True,
            )
            if self.tracker is not None:
                self.tracker.close()
            self.tracker = None
            self.position = self.new_position(self.position.project)
            self.file.rewind()
        lines = self.file.read()
        if earlier_attempt(self.folder) != earlier:  # whose lines these are is not known
            self.file.rewind()
            return []
        return [line for line in lines if self.position.unsent(line)]

    def send(self, lines: Sequence[Mapping[str, Any]], stop: threading.Event) -> None:
        """Send lines to the tracker. Errors: Failure with the tracker's reason."""
        with explained(self.name):
            if self.tracker is None:
                self.tracker = self.open()
            elif self.tracker.writes_within_a_second:
                self.save()  # of the lines before these
            for line in lines:
                if stop.is_set():
                    self.file.rewind()
                    return
                if values := flat(self.position.unsent(line), shows_ranks(self.folder, line)):
                    self.tracker.log(self.position.lines, line["step"], values)
                    self.position.count(line)

    def open(self) -> Tracker:
        """The tracker's run, new or the one of before; says where it is."""
        is_new = not self.path.exists()
        self.save()  # before the tracker knows of it
        config = tomllib.loads((self.folder / CONFIG).read_text(encoding="utf-8"))
        tracker = TRACKERS[self.name](
            self.position.project, self.position.id, self.folder.name, config
        )
        known = None if is_new else tracker.last_steps()
        if known == {} and self.position.lines:
            raise ConfigError(
                f"{self.name} has no run {self.position.id} here, to which {self.position.lines} "
                f"lines were sent; set its server or folder as before, or remove {self.path} to "
                "send the run again, as a new one"
            )
        # This command may have been killed before it noted what it had sent.
        for tag, step in (known or {}).items():
            self.position.sent[tag] = max(step, self.position.sent.get(tag, -1))
        print(f"{self.folder}: {tracker.where}", flush=True)
        return tracker

    def end(self, summary: dict[str, Any] | None) -> int:
        """Send the summary and the sample, and leave; returns the exit status."""
        sent = "nothing new"
        if self.tracker is not None:
            with explained(self.name):
                if summary is not None and hash_of(summary) != self.position.summary:
                    self.send_summary(self.tracker, summary)
                self.tracker.close()
            self.save()
            sent = f"{self.position.lines} lines sent"
        state = summary["stopped_by"] if summary else "it has not ended"
        print(f"{self.folder}: {sent}; {state}", flush=True)
        return 0

    def send_summary(self, tracker: Tracker, summary: dict[str, Any]) -> None:
        sample = ""
        with suppress(FileNotFoundError):
            sample = (self.folder / "sample.txt").read_text(encoding="utf-8", errors="replace")
        values = flat({"summary": summary}, ranks=False)
        tracker.end(int(summary.get("steps", 0)), summary, values, sample)
        self.position.summary = hash_of(summary)

    def new_position(self, project: str) -> Position:
        """With an id that no other folder of the same name gets, here or elsewhere."""
        name = re.sub(r"[^\w.-]", "-", self.folder.name, flags=re.ASCII)[:48]
        return Position(f"{name}-{secrets.token_hex(3)}", project, earlier_attempt(self.folder))

    def load(self, project: str) -> Position:
        """What was sent before. Errors: DataError if the file is damaged, ConfigError if it names
        another project.
        """
        try:
            position = Position(**json.loads(self.path.read_text()))
            if project in ("", position.project):
                return position
            raise ConfigError(
                f"--project {project}: this run goes to {position.project}; leave the option out, "
                f"or remove {self.path} to send the run again, as a new one"
            )
        except FileNotFoundError:
            return self.new_position(
                project or os.environ.get(TRACKERS[self.name].project_variable, "dist_amp")
            )
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{self.path} can't be read ({first_line(error)}); remove it to send the run "
                "again, as a new one"
            ) from error

    def save(self) -> None:
        """Errors: Failure."""
        if (text := json.dumps(asdict(self.position))) == self.saved:
            return
        try:
            write_durably(self.path, text + "\n")
        except OSError as error:
            raise Failure(
                f"{self.path} can't be written ({error.strerror}), and it has to keep what was "
                "sent; make room, or allow writing there"
            ) from error
        self.saved = text


@contextmanager
def explained(tracker: str) -> Iterator[None]:
    """Whatever a tracker raises, as a Failure in one line."""
    try:
        yield
    except Failure:
        raise
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise Failure(f"{tracker}: {reason}; start the same command again to continue") from error


if __name__ == "__main__":
    sys.exit(main())
