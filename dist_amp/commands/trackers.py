"""The trackers that `follow` can send a run to. To add one, write a class and list it below.

Each is imported when it is used. Its server, login and offline mode are left to its own environment
variables.
"""

import importlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from dist_amp.errors import ConfigError, first_line

# In one request, at most. Source: mlflow.org/docs, "REST API", limits.
MLFLOW_PARAMS = 100
MLFLOW_METRICS = 1000
Values = Mapping[str, float]
Facts = Mapping[str, Any]
Steps = dict[str, int] | None


class Tracker:
    """One run in a tracker. `id` names it there, and stays the same when a follower continues."""

    project_variable: str  # the environment variable that names the project
    where: str  # to look at it, for the user
    writes_within_a_second = True  # else what was logged survives a kill after close() alone

    def __init__(self, project: str, id: str, name: str, config: Facts): ...

    def last_steps(self) -> Steps:
        """The last step of each tag, "ranks" for all of the ranks'; None if it can't be asked."""
        return None

    def log(self, number: int, step: int, values: Values) -> None:
        """Add the values of a step; `number` counts the calls for this run in all processes."""

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        """Add the run's summary, whole and as numbers, and its model's sample, if any."""

    def close(self) -> None:
        """Return when all is written."""


class Wandb(Tracker):
    project_variable = "WANDB_PROJECT"
    writes_within_a_second = False  # offline it writes blocks of 32 KiB

    def __init__(self, project: str, id: str, name: str, config: Facts):
        wandb = imported("wandb")
        # Of this process, not of the run.
        settings = wandb.Settings(console="off", quiet=True, x_disable_stats=True)
        try:
            self._run = wandb.init(
                project=project,
                id=id,
                name=name,
                config=dict(config),
                resume="allow",
                allow_val_change=True,
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"wandb: {first_line(error).rstrip('.')}, or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._first = self._run.step  # of a run that is resumed, what its server lacks
        self._exit_code = 0
        self.where = str(self._run.url)
        if self._run.offline:
            folder = os.path.dirname(self._run.dir)
            self.where = f"wandb offline; upload it with: wandb sync {folder}"

    def log(self, number: int, step: int, values: Values) -> None:
        """wandb's own step is `number`: it rises where a tag is written ahead."""
        if number >= self._first:
            self._run.log({"step": step, **values}, step=number, commit=True)

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        values_and_sample = dict(summary)
        if sample:
            values_and_sample["sample"] = sample
        self._run.summary.update(values_and_sample)
        self._exit_code = int(summary.get("exit_code", 0))

    def close(self) -> None:
        self._run.finish(self._exit_code)


class Trackio(Tracker):
    project_variable = "TRACKIO_PROJECT"

    def __init__(self, project: str, id: str, name: str, config: Facts):
        self._trackio = imported("trackio")
        self._project = project
        self._id = id
        with redirect_stdout(StringIO()):  # its instructions
            off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            self._run = self._trackio.init(project, id, config=dict(config), resume="allow", **off)
        servers = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
        self._is_local = not any(map(os.environ.get, servers))
        self.where = f"trackio; look at it with: trackio show --project {project}"

    def last_steps(self) -> Steps:
        if not self._is_local:
            return None
        storage = imported("trackio.sqlite_storage").SQLiteStorage
        steps: dict[str, int] = {}
        for row in storage.get_logs(self._project, self._id):
            for tag in grouped(row):
                steps[tag] = max(int(row["step"]), steps.get(tag, -1))
        return steps

    def log(self, number: int, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        text = {"sample": self._trackio.Markdown(f"```\n{sample}\n```")} if sample else {}
        self._run.log({**values, **text}, step=step)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._trackio.finish()


class MLflow(Tracker):
    project_variable = "MLFLOW_EXPERIMENT_NAME"

    def __init__(self, project: str, id: str, name: str, config: Facts):
        mlflow = imported("mlflow")
        for library in ("mlflow", "alembic"):  # they report the making of a database table by table
            logging.getLogger(library).setLevel(logging.WARNING)
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        place = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([place], f"tags.dist_amp_id = '{id}'")
        if found:
            self._run = found[0]
        else:
            self._run = self._client.create_run(place, tags={"dist_amp_id": id}, run_name=name)
        self._id = self._run.info.run_id
        self._status = "RUNNING"
        self._client.update_run(self._id, status=self._status)
        # A parameter can't be changed: of a resumed run, those of its first start stay.
        sent = self._run.data.params
        params = [item for item in flat_config(config) if item[0] not in sent]
        for start in range(0, len(params), MLFLOW_PARAMS):
            some = [mlflow.entities.Param(*each) for each in params[start : start + MLFLOW_PARAMS]]
            self._client.log_batch(self._id, params=some)
        self.where = f"mlflow at {mlflow.get_tracking_uri()}; experiment {project}, run {self._id}"

    def last_steps(self) -> Steps:
        steps = {}
        # One of the ranks' tags is enough: they are sent at once.
        for tag, key in grouped(self._run.data.metrics).items():
            history = self._client.get_metric_history(self._id, key)
            steps[tag] = max(metric.step for metric in history)
        return steps

    def log(self, number: int, step: int, values: Values) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(tag, value, now, step) for tag, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MLFLOW_METRICS])

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        self.log(0, step, values)
        self._client.log_dict(self._id, dict(summary), "summary.json")
        if sample:
            self._client.log_text(self._id, sample, "sample.txt")
        statuses = {"completed": "FINISHED", "failed": "FAILED"}
        self._status = statuses.get(summary["stopped_by"], "KILLED")

    def close(self) -> None:
        if self._status != "RUNNING":
            self._client.set_terminated(self._id, self._status)


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def imported(module: str) -> Any:
    """The module. Errors: ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; pip install -e '.[{module}]' in the clone's folder"
        ) from error


def grouped(tags: Iterable[str]) -> dict[str, str]:
    """{tag: tag}, with "ranks" in place of all that are a rank's."""
    groups = {}
    for tag in tags:
        name = "ranks" if tag.startswith("rank0") else tag
        groups[name] = tag
    return groups


def flat_config(config: Facts, prefix: str = "") -> Iterator[tuple[str, str]]:
    """{"a": {"b": 1}} as ("a.b", "1")."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)
