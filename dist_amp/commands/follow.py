"""python -m dist_amp.follow RUN --to wandb|trackio|mlflow: send a run's metrics to a tracker.

It reads the run's folder, while the run trains or afterwards; --once sends what exists and ends.
The run itself imports no tracker and never waits for one. RUN/follow_TRACKER.json records what was
sent, so that if interrupted, the same command continues it in the tracker. It sends the config,
the metrics under the same tags as in TensorBoard, those of each rank as rank00000/TAG (up to 64
ranks), and at the end the summary and the sample. Configure the tracker by its own environment
variables: WANDB_MODE, MLFLOW_TRACKING_URI ... Those that name a project replace the default.

Exit status: 0 all is sent, 64 bad arguments, no package or no login, 65 not a run's folder, 1
anything else.

Docs: docs/metrics.md
"""

import json
import os
import re
import secrets
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from dist_amp.commands.trackers import TRACKERS, Tracker
from dist_amp.errors import ConfigError, DataError, Failure, first_line, masked
from dist_amp.files import InUse, only_process, parse_row, write_durably
from dist_amp.supervise.command_line import Parser, command, run_folder

POLL_SECONDS = 1.0
APPEARS_SECONDS = 120.0  # to wait for a run that is just starting
# Time for a run that failed or was preempted to be restarted; then following it ends.
RESTART_SECONDS = 30.0


@command("; start the same command again to continue")
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.follow", __doc__)
    parser.add_argument("run", type=run_folder, metavar="RUN", help="a run's folder")
    parser.add_argument("--to", required=True, choices=list(TRACKERS), help="the tracker")
    parser.add_argument("--project", default="", help="project or experiment; default dist_amp")
    parser.add_argument("--once", action="store_true", help="send what exists now, and end")
    options = parser.parse_args(argv)
    folder = options.run.resolve()
    wait_for_run(folder, 0.0 if options.once else APPEARS_SECONDS)
    try:
        with only_process(folder / f".follow_{options.to}.lock"):  # so nothing is sent twice
            Follower(folder, options.to, options.project).follow(options.once)
    except InUse as error:
        raise Failure(
            f"{folder} is already followed to {options.to} by another process ({error}); stop "
            "that one first"
        ) from error
    except Failure:
        raise
    except Exception as error:  # from the tracker or the disk
        reason = first_line(error) or type(error).__name__
        text = f"{options.to}: {reason}; start the same command again to continue"
        raise Failure(text) from error


def wait_for_run(folder: Path, seconds: float) -> None:
    """Wait until a run has begun in the folder. Raises DataError if none does."""
    config = folder / "config.toml"
    if seconds and not config.exists():
        print(f"waiting up to {seconds:.0f} s for a run in {folder}", flush=True)
    deadline = time.monotonic() + seconds
    while not config.exists():
        if time.monotonic() >= deadline:
            raise DataError(
                f"{folder} is not a run's folder: it has no config.toml; start the run, or give "
                "the folder that run.dir names"
            )
        time.sleep(POLL_SECONDS)


@dataclass
class Position:
    """The lines that a tracker has received, kept in RUN/follow_TRACKER.json."""

    id: str  # of the run in the tracker
    project: str
    lines: int = 0  # how many were sent
    sent: dict[str, int] = field(default_factory=dict)  # {tag: the last step sent}
    summary: str = ""  # hash of the summary that was sent

    def unsent(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """The line's values that were not sent yet: a resumed run logs some steps again."""
        return {
            tag: value
            for tag, value in line.items()
            if tag not in ("step", "unix_time") and line["step"] > self.sent.get(clean(tag), -1)
        }


class Follower:
    """Sends a run's folder to a tracker. Raises ConfigError for another project than before."""

    def __init__(self, folder: Path, tracker: str, project: str):
        self.folder = folder
        self.name = tracker
        self.inode = 0  # of metrics.jsonl, which a resumed run replaces
        self.offset = 0  # how many of its bytes were read
        self.path = folder / f"follow_{tracker}.json"
        self.tracker: Tracker | None = None
        # An id that no other folder of the same name gets, on any machine.
        name = re.sub(r"[^\w.-]", "-", folder.name, flags=re.ASCII)[:48]
        default = os.environ.get(TRACKERS[tracker].project_variable, "dist_amp")
        self.position = Position(f"{name}-{secrets.token_hex(3)}", project or default)
        if self.path.exists():
            saved = json.loads(self.path.read_text())
            saved.pop("earlier", None)  # written by earlier versions
            self.position = Position(**saved)
            if project not in ("", self.position.project):
                raise ConfigError(
                    f"--project {project}: this run goes to {self.position.project}; leave the "
                    f"option out, or remove {self.path} to send the run again, as a new one"
                )

    def follow(self, once: bool) -> None:
        is_over = False
        try:
            while not is_over:
                # Before the lines, because a run writes its last lines before its summary.
                summary = read_summary(self.folder)
                is_over = once
                if summary is not None:  # if old enough, no restart will follow
                    age = time.time() - (self.folder / "summary.json").stat().st_mtime
                    is_over |= summary["stopped_by"] == "completed" or age >= RESTART_SECONDS
                lines = [line for line in self.new_lines() if self.position.unsent(line)]
                if lines or not is_over or hash_of(summary) != self.position.summary:
                    self.send(lines)  # opens the tracker at first; saves the earlier position
                if not is_over:
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self.close()
            raise
        self.end(summary)

    def new_lines(self) -> list[dict[str, Any]]:
        """The complete lines since the last call; all of them if the run has replaced the file."""
        try:
            with (self.folder / "metrics.jsonl").open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self.inode or state.st_size < self.offset:
                    self.offset = 0
                self.inode = state.st_ino
                file.seek(self.offset)
                text = file.read()
        except OSError:  # not there yet, or replaced on a network disk
            return []
        complete = text[: text.rfind(b"\n") + 1]  # a line may be half written
        self.offset += len(complete)
        rows = map(parse_row, complete.splitlines())
        return [row for row in rows if row is not None]  # leaves damaged lines out

    def send(self, lines: Sequence[Mapping[str, Any]]) -> None:
        if self.tracker is None:
            self.tracker = self.open()
        elif self.tracker.writes_within_a_second:
            self.save()  # the tracker has written the lines before these
        for line in lines:
            unsent = self.position.unsent(line)
            if values := flat(unsent):
                seconds = line.get("unix_time", 0.0)
                self.tracker.log(self.position.lines, line["step"], seconds, values)
                self.position.sent |= {clean(tag): line["step"] for tag in unsent}
                self.position.lines += 1

    def open(self) -> Tracker:
        self.save()  # first, so that the id is not lost once the tracker has the run
        toml = (self.folder / "config.toml").read_text(encoding="utf-8")
        config = tomllib.loads(masked(toml))
        position = self.position
        tracker = TRACKERS[self.name](position.project, position.id, self.folder.name, config)
        if position.lines and not tracker.has_run:
            raise ConfigError(
                f"{self.name} has no run {position.id} here, to which {position.lines} lines were "
                f"sent; set its server or folder as before, or remove {self.path} to send the run "
                "again, as a new one"
            )
        print(f"{self.folder}: {tracker.where}", flush=True)
        return tracker

    def end(self, summary: dict[str, Any] | None) -> None:
        if self.tracker is not None and summary and hash_of(summary) != self.position.summary:
            path = self.folder / "sample.txt"
            sample = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            values = flat({"summary": {**summary, "ranks": None}})
            self.tracker.end(int(summary.get("steps", 0)), summary, values, sample)
            self.position.summary = hash_of(summary)
        self.close()
        state = summary["stopped_by"] if summary else "it has not ended"
        print(f"{self.folder}: {self.position.lines} lines sent; {state}", flush=True)

    def close(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
            self.save()
        self.tracker = None

    def save(self) -> None:
        write_durably(self.path, json.dumps(asdict(self.position)) + "\n")


# --- the run's files


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The run's summary; None while the run goes on, also after a restart."""
    path = folder / "summary.json"
    try:
        started = (folder / "config.toml").stat().st_mtime_ns  # written at each start
        if path.stat().st_mtime_ns < started:
            return None
        return json.loads(masked(path.read_text(encoding="utf-8")))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def hash_of(summary: Mapping[str, Any] | None) -> str:
    return sha256(json.dumps(summary).encode()).hexdigest()[:16] if summary else ""


def clean(tag: str) -> str:
    """The tag with "_" in place of characters that some trackers reject."""
    return re.sub(r"[^\w./ -]", "_", tag, flags=re.ASCII)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """{"ranks": [{"a": 1}], "b": "nan"} as {"rank00000/a": 1.0, "b": nan}; only numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if name == "ranks":
            for rank, tags in enumerate(value or ()):
                found |= flat(tags, f"{prefix}rank{rank:05d}/")
        elif isinstance(value, dict):
            found |= flat(value, f"{prefix}{clean(name)}/")
        elif isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
            found[prefix + clean(name)] = float(value)
    return found


if __name__ == "__main__":
    sys.exit(main())
