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

# Options of torchrun, which are often given to the main job.
OF_LAUNCHERS = (
    *("nproc", "nproc_per_node", "nnodes", "node_rank", "num_gpus", "gpus", "max_restarts"),
    *("master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "standalone"),
)


def removed(key: str) -> str:
    """The replacement of a setting of an earlier release; "" for other keys."""
    instead = REMOVED.get(re.sub(r"^data\.sources\.\w+\.", "data.", key), "")
    return instead and f" is no longer a setting: {instead}"


def unknown(key: str, source: str, known: Sequence[str]) -> str:
    """The error for a key that is not among the known ones."""
    if text := removed(key):
        return f"{key} {source}{text}"
    start = f"unknown key {key} {source}"
    if key in OF_LAUNCHERS:
        return f"{start}: it is an option of torchrun and of dist_amp launch, which starts ranks"
    section, _, name = key.lower().rpartition(".")
    if section == "task.args":
        names = [other.removeprefix("task.args.") for other in known if "task.args." in other]
        if near := nearest_name(name, names):
            return f"{start}; did you mean task.args.{near}?"
        return f"{start}; the task takes {', '.join(names) or 'no arguments'}"
    near = ELSEWHERE.get(name) or nearest_name(key.lower(), known)
    same_name = [other for other in known if other.rpartition(".")[2] == name]
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
    ending = ""
    choices = re.findall(r"'([^']+)'", " ".join(expected))
    if any(problem["type"] == "bool_type" for problem in problems):
        choices += ["true", "false"]
    if near := nearest_name(value.strip('"').lower(), choices):
        ending = f"; did you mean {near}?"
    elif lost := re.search(r" ([a-z]\w*(\.[a-z]\w*)+=\S+)", value):
        ending = f"; write --{lost[1]}"
    return " or ".join(dict.fromkeys(expected)) + ending


def with_dashes(words: Sequence[str]) -> str:
    """A suggestion for words that belong to no key."""
    key, equals, value = words[0].partition("=")
    if not re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", key) or key.endswith(".py"):
        return f"write --section.key {words[0]}"
    if not equals:
        value = "".join(words[1:2]) or "VALUE"
    return f"write --{key}={value}"
