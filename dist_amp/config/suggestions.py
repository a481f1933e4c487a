"""The ends of the errors for a wrong key or value: what it may be meant for, what is expected."""

import re
from collections.abc import Sequence
from typing import Any

from dist_amp.errors import nearest_name

# Removed settings, and what to do now.
REMOVED = {
    "data.format": "the files' endings tell it; rename them, or name links to them, as *.jsonl",
    "data.revision": "append it to data.name, as user/name@REVISION",
    "data.validation_fraction": "set data.validation_split to it",
    "data.mix_by": "the weights of a mixture count rows; remove it",
    "data.map_up_to_gib": "set data.view=parquet, or data.view=map",
    "data.max_bad_samples": "give data.on_bad_sample this number",
    "data.max_repeats": "a source whose rows come more than 20 times is warned of; remove it",
    "data.long_documents": "longer documents are split if they are packed, else cut; remove it",
    "data.shuffle_groups": "the rows of two row groups are shuffled together; remove it",
    "precision.matmul": "float8 is precision.dtype=fp8",
    "precision.scaler.min_scale": "a run ends if its loss scale falls below 1; remove it",
    "compile.backend": "set compile.mode=aot_eager or eager to generate no code, or remove it",
    "compile.fullgraph": "graph breaks are reported and allowed; remove it",
    "compile.dynamic": "set compile.blocks=dynamic, or remove it",
    "train.gc_every": "garbage collection no longer scans the model; remove it",
    "checkpoint.on_failure": "a run continues without a checkpoint that fails; remove it",
    "optim.decay_ratio": "wsd decays in the last fifth; a task's schedule(step) can differ",
    "debug.ranks": "debug.profile records all ranks; remove it",
    "debug.check_every": "ranks are compared every 100 steps; remove it",
    "debug.memory_snapshot": "debug.profile records GPU memory too; set debug.profile=1",
}

# What other libraries call a setting, where no name here is like it.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "train.micro_batch_size",
    "max_steps": "train.steps",
    "num_workers": "data.workers",
    "gradient_accumulation_steps": "train.accumulation_steps",
}


def removed(key: str) -> str:
    """The replacement of a setting of an earlier release; "" for other keys."""
    instead = REMOVED.get(re.sub(r"^data\.sources\.\w+\.", "data.", key), "")
    return instead and f" is no longer a setting: {instead}"


def unknown(key: str, source: str, known: Sequence[str]) -> str:
    """The error for a key that is not among the known ones."""
    if text := removed(key):
        return f"{key} {source}{text}"
    start = f"unknown key {key} {source}"
    if key in ("nproc_per_node", "nnodes", "standalone"):
        return f"{start}: it is an option of torchrun and of dist_amp launch, which starts ranks"
    name = key.lower().rpartition(".")[2]
    if key.startswith("task.args."):
        names = [other.removeprefix("task.args.") for other in known if "task.args." in other]
        if near := nearest_name(name, names):
            return f"{start}; did you mean task.args.{near}?"
        return f"{start}; the task takes {', '.join(names) or 'no arguments'}"
    same_name = [other for other in known if other.endswith(f".{name}")]
    near = ELSEWHERE.get(name) or nearest_name(key.lower(), known)
    if len(same_name) == 1:
        near = same_name[0]
    return f"{start}; did you mean {near}?" if near else f"{start}; --help lists every key"


def rule(problems: Sequence[Any], value: str) -> str:
    """The values that pydantic accepts, such as "a valid integer or 'off'"."""
    expected = []
    for problem in problems:
        text = problem["msg"].removeprefix("Input should be ")
        if problem["type"] == "missing":  # an item
            text = "more values"
        elif problem["type"] == "needs_python_object":
            text = "left out, as no setting can have its type; set it in the task"
        expected.append(text.replace("a valid array", "values, separated by spaces"))
    text = " or ".join(dict.fromkeys(expected))
    choices = re.findall(r"'([^']+)'", text)
    if near := nearest_name(value.strip('"').lower(), choices):
        text += f"; did you mean {near}?"
    return text
