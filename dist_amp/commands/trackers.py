"""The trackers that `follow` can send a run to. To add one, write a class with these methods and list it below.

Each is imported when it is used; a missing one is refused with the command that installs it. Its server, login and
offline mode are left to its own environment variables.
"""

import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Protocol

from dist_amp.errors import ConfigError, first_line

MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # in one request, at most. Source: mlflow.org/docs, "REST API", limits


class Tracker(Protocol):
    """One run in a tracker. `id` names it there, and stays the same when a follower goes on."""

    project_variable: str  # the environment variable that names the project
    where: str  # to look at it, for the user
    writes_within_a_second: bool  # what was logged survives a kill of this process; if not, after close() alone

    def __init__(self, project: str, id: str, name: str, config: Mapping[str, Any]): ...

    def last_steps(self) -> dict[str, int] | None:
        """The last step of each tag that the tracker has, "ranks" for all of the ranks'; None if it can't be asked."""

    def log(self, number: int, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step; `number` counts the calls for this run, those of earlier processes too."""

    def end(self, step: int, summary: Mapping[str, Any], values: Mapping[str, float], sample: str) -> None:
        """Add the run's summary, whole and as numbers, and what its model has written, if anything."""

    def close(self) -> None:
        """Return when all is written."""


class Wandb:
    project_variable, writes_within_a_second = "WANDB_PROJECT", False  # offline it writes blocks of 32 KiB

    def __init__(self, project: str, id: str, name: str, config: Mapping[str, Any]):
        wandb = imported("wandb", "wandb")
        settings = wandb.Settings(console="off", quiet=True, x_disable_stats=True)  # of this process, not of the run
        try:
            self._run = wandb.init(
                project=project, id=id, name=name, config=dict(config), resume="allow", allow_val_change=True,
                settings=settings,
            )  # fmt: skip
        except wandb.errors.UsageError as error:
            raise ConfigError(f"wandb: {first_line(error).rstrip('.')}, or set WANDB_MODE=offline") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._first, self._exit_code = self._run.step, 0  # of a run that is resumed, what its server lacks
        folder = os.path.dirname(self._run.dir)
        self.where = f"wandb offline; upload it with: wandb sync {folder}" if self._run.offline else str(self._run.url)

    def last_steps(self) -> dict[str, int] | None:
        return None

    def log(self, number: int, step: int, values: Mapping[str, float]) -> None:
        """wandb's own step is `number`, which its server has once, and which rises where a tag is written ahead."""
        if number >= self._first:
            self._run.log({"step": step, **values}, step=number, commit=True)

    def end(self, step: int, summary: Mapping[str, Any], values: Mapping[str, float], sample: str) -> None:
        self._run.summary.update({**summary, "sample": sample} if sample else dict(summary))
        self._exit_code = int(summary.get("exit_code", 0))

    def close(self) -> None:
        self._run.finish(self._exit_code)


class Trackio:
    project_variable, writes_within_a_second = "TRACKIO_PROJECT", True

    def __init__(self, project: str, id: str, name: str, config: Mapping[str, Any]):
        self._trackio, self._project, self._id = imported("trackio", "trackio"), project, id
        with redirect_stdout(StringIO()):  # its instructions
            self._run = self._trackio.init(
                project, id, config=dict(config), resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
            )
        self._is_local = not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))
        self.where = f"trackio; look at it with: trackio show --project {project}"

    def last_steps(self) -> dict[str, int] | None:
        if not self._is_local:
            return None
        rows = imported("trackio.sqlite_storage", "trackio").SQLiteStorage.get_logs(self._project, self._id)
        return {tag: int(row["step"]) for row in sorted(rows, key=lambda row: row["step"]) for tag in grouped(row)}

    def log(self, number: int, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, step: int, summary: Mapping[str, Any], values: Mapping[str, float], sample: str) -> None:
        text = {"sample": self._trackio.Markdown(f"```\n{sample}\n```")} if sample else {}
        self._run.log({**values, **text}, step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()


class MLflow:
    project_variable, writes_within_a_second = "MLFLOW_EXPERIMENT_NAME", True

    def __init__(self, project: str, id: str, name: str, config: Mapping[str, Any]):
        mlflow = imported("mlflow", "mlflow")
        for library in ("mlflow", "alembic"):  # they report the making of a database table by table
            logging.getLogger(library).setLevel(logging.WARNING)
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([place], f"tags.dist_amp_id = '{id}'")
        self._run = found[0] if found else self._client.create_run(place, tags={"dist_amp_id": id}, run_name=name)
        self._id, self._status = self._run.info.run_id, "RUNNING"
        self._client.update_run(self._id, status=self._status)
        # A parameter can't be changed: of a resumed run, those of its first start stay.
        params = {key: value for key, value in flat_config(config) if key not in self._run.data.params}
        for some in in_parts(params, MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=[mlflow.entities.Param(*item) for item in some.items()])
        self.where = f"mlflow at {mlflow.get_tracking_uri()}; experiment {project}, run {self._id}"

    def last_steps(self) -> dict[str, int] | None:
        of_tags: dict[str, str] = {}
        for key in self._run.data.metrics:
            of_tags |= dict.fromkeys(grouped([key]), key)  # one of the ranks' tags is enough: they are sent at once
        histories = {tag: self._client.get_metric_history(self._id, key) for tag, key in of_tags.items()}
        return {tag: max(metric.step for metric in history) for tag, history in histories.items()}

    def log(self, number: int, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        for some in in_parts(values, MLFLOW_METRICS):
            metrics = [self._entities.Metric(tag, value, now, step) for tag, value in some.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def end(self, step: int, summary: Mapping[str, Any], values: Mapping[str, float], sample: str) -> None:
        self.log(0, step, values)
        self._client.log_dict(self._id, dict(summary), "summary.json")
        if sample:
            self._client.log_text(self._id, sample, "sample.txt")
        self._status = {"completed": "FINISHED", "failed": "FAILED"}.get(summary["stopped_by"], "KILLED")

    def close(self) -> None:
        if self._status != "RUNNING":
            self._client.set_terminated(self._id, self._status)


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def imported(module: str, extra: str) -> Any:
    """The module. Errors: ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = (
            "is not installed" if isinstance(error, ModuleNotFoundError) and error.name == extra else f"fails: {error}"
        )
        raise ConfigError(f"{extra} {reason}; pip install -e '.[{extra}]' in the clone's folder") from error


def grouped(tags: Any) -> set[str]:
    """The tags, with "ranks" in place of all that are a rank's."""
    return {"ranks" if tag.startswith("rank0") else tag for tag in tags}


def in_parts(values: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """The values in dicts of at most `size`."""
    items = list(values.items())
    yield from (dict(items[start : start + size]) for start in range(0, len(items), size))


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """{"a": {"b": 1}} as ("a.b", "1")."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)
