"""Calls of the task's optional methods: what they raise ends the run in one line; misspelt ones are noticed."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from dist_amp.config.suggest import nearest_name
from dist_amp.errors import Failure, in_one_line

OPTIONAL = (
    *("collate", "augment", "blocks", "units", "tokens", "flops_per_item", "metrics", "load", "export", "sample"),
    *("groups", "optimizer", "schedule", "on_step", "on_evaluation", "train_metrics"),
)
CLOSE = 0.85  # finds sheduler and metric; a helper such as tokenize or load_files is further from any name


def call_task(kind: type[Failure], name: str, method: Callable[..., Any], *args: Any, when: str = "") -> Any:
    """What the task's method returns. Errors: `kind`, one line with file and line, in place of what it raises."""
    try:
        return method(*args)
    except Failure:
        raise
    except Exception as error:
        raise kind(f"the task's {name} failed{when}: {in_one_line(error)}; fix it") from error


def misspelt_methods(task: Any) -> dict[str, str]:
    """{method that nothing calls: the optional method that it may be meant for}.

    Of the methods written in the file of the task's class, those that the file does not use itself and whose names are
    almost an optional one's, or begin with "on_" as the callbacks' do.
    """
    cls = type(task)
    try:
        source = inspect.getsource(inspect.getmodule(cls))  # type: ignore[arg-type]
    except (OSError, TypeError):  # made in a notebook or by a factory
        source = ""
    found = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name[0] == "_" or name in OPTIONAL or method.__module__ != cls.__module__:
            continue
        if re.search(rf"\.{name}\b", source):
            continue
        missing = [known for known in OPTIONAL if not hasattr(task, known)]
        near = nearest_name(name, missing, CLOSE)
        if name.startswith("on_"):
            near = near or nearest_name(name, [known for known in missing if known.startswith("on_")])
        if near:
            found[name] = near
    return found
