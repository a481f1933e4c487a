"""The trackers that `follow` can send a run to. Their own environment variables configure them."""

import importlib
import logging
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from dist_amp.config.text import leaves
from dist_amp.errors import ConfigError, first_line

# Limits of one request. Source: mlflow.org/docs, "REST API", limits.
MLFLOW_PARAMS = 100
MLFLOW_METRICS = 1000
Values = Mapping[str, float]
Facts = Mapping[str, Any]


class Tracker:
    """One run in a tracker. `id` identifies the run there, also after an interruption."""

    project_variable: str  # the environment variable that names the project
    where: str  # where the user finds the run
    has_run = True  # False: the tracker has no record of the run
    writes_within_a_second = True  # False: a killed `follow` may lose lines

    def __init__(self, project: str, id: str, name: str, config: Facts): ...

    def log(self, number: int, step: int, seconds: float, values: Values) -> None:
        """Add a step's values, logged at a Unix time. A line keeps its number if sent again."""

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        """Add the run's summary, its numbers as `values`, and the model's sample, if any."""

    def close(self) -> None:
        """Return when all is written."""


class Wandb(Tracker):
    project_variable = "WANDB_PROJECT"
    writes_within_a_second = False  # offline it writes blocks of 32 KiB

    def __init__(self, project: str, id: str, name: str, config: Facts):
        wandb = imported("wandb")
        options: dict[str, Any] = {"resume": "allow", "allow_val_change": True}
        # wandb would record the output and resources of this process, which is not the run.
        options["settings"] = wandb.Settings(console="off", quiet=True, x_disable_stats=True)
        try:
            self._run = wandb.init(
                project=project, id=id, name=name, config=dict(config), **options
            )
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"wandb: {first_line(error).rstrip('.')}, or set WANDB_MODE=offline"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._first = self._run.step  # the number of the first line that the server lacks
        self._exit_code = 0
        self.where = str(self._run.url)
        if self._run.offline:
            folder = os.path.dirname(self._run.dir)
            self.where = f"wandb offline; upload it with: wandb sync {folder}"

    def log(self, number: int, step: int, seconds: float, values: Values) -> None:
        """wandb's step is `number`, because a step may not decrease, as it does after a resume."""
        if number >= self._first:
            self._run.log({"step": step, **values}, step=number, commit=True)

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        self._run.summary.update({**summary, **({"sample": sample} if sample else {})})
        self._exit_code = int(summary.get("exit_code", 0))

    def close(self) -> None:
        self._run.finish(self._exit_code)


class Trackio(Tracker):
    project_variable = "TRACKIO_PROJECT"

    def __init__(self, project: str, id: str, name: str, config: Facts):
        self._trackio = imported("trackio")
        with redirect_stdout(StringIO()):  # hides its instructions
            off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
            self._run = self._trackio.init(project, id, config=dict(config), resume="allow", **off)
        self._sent: set[tuple[int, str]] = set()
        if not any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))):
            storage = imported("trackio.sqlite_storage").SQLiteStorage
            for row in storage.get_logs(project, id):
                self._sent |= {(row["step"], tag) for tag in row}
            self.has_run = bool(self._sent)
        self.where = f"trackio; look at it with: trackio show --project {project}"

    def log(self, number: int, step: int, seconds: float, values: Values) -> None:
        new = {tag: value for tag, value in values.items() if (step, tag) not in self._sent}
        if new:
            self._run.log(new, step=step)

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
        for library in ("mlflow", "alembic"):  # they log each database table that they create
            logging.getLogger(library).setLevel(logging.WARNING)
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        parent = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([parent], f"tags.dist_amp_id = '{id}'")
        self.has_run = bool(found)
        tags = {"dist_amp_id": id}
        run = found[0] if found else self._client.create_run(parent, tags=tags, run_name=name)
        self._id = run.info.run_id
        self._status = "RUNNING"
        self._client.update_run(self._id, status=self._status)
        # MLflow's parameters can't be changed: a resumed run keeps those of its first start.
        sent = run.data.params
        param = mlflow.entities.Param
        params = [param(key, str(value)) for key, value in leaves(config) if key not in sent]
        for start in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MLFLOW_PARAMS])
        self.where = f"mlflow at {mlflow.get_tracking_uri()}; experiment {project}, run {self._id}"

    def log(self, number: int, step: int, seconds: float, values: Values) -> None:
        """MLflow ignores a metric that it has with the same step, time and value."""
        metric = self._entities.Metric
        metrics = [metric(tag, value, int(1000 * seconds), step) for tag, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MLFLOW_METRICS])

    def end(self, step: int, summary: Facts, values: Values, sample: str) -> None:
        self.log(0, step, time.time(), values)
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
    """The module. Raises ConfigError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; pip install {error.name}") from error
