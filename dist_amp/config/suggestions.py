"""Error texts for wrong keys and values: the likeliest key, the expected values."""

import re
from collections.abc import Sequence
from typing import Any

from dist_amp.errors import nearest_name

# {removed setting: what to do instead}
REMOVED = {
    "data.format": "file extensions tell the format; rename the files, or link to them, as *.jsonl",
    "data.revision": "append it to data.name, as user/name@REVISION",
    "data.validation_fraction": "set data.validation_split to this number",
    "data.mix_by": "the weights of a mixture always count rows; remove it",
    "data.map_up_to_gib": "set data.view=parquet, or data.view=map",
    "data.max_bad_samples": "set data.on_bad_sample to this number",
    "data.max_repeats": "a run warns if a source's rows repeat more than 20 times; remove it",
    "data.long_documents": "long documents are split if packed, else truncated; remove it",
    "data.shuffle_groups": "rows are shuffled over two row groups at a time; remove it",
    "precision.matmul": "float8 is precision.dtype=fp8",
    "precision.scaler.min_scale": "a run ends if its loss scale falls below 1; remove it",
    "compile.backend": "set compile.mode=aot_eager or compile.mode=eager, or remove it",
    "compile.fullgraph": "graph breaks are reported and allowed; remove it",
    "compile.dynamic": "set compile.blocks=dynamic, or remove it",
    "train.gc_every": "garbage collection no longer scans the model; remove it",
    "checkpoint.on_failure": "a run continues without a checkpoint that fails; remove it",
    "optim.decay_ratio": "wsd decays over the last fifth; else define schedule(step) in the task",
    "debug.ranks": "debug.profile records all ranks; remove it",
    "debug.check_every": "ranks are compared every 100 steps; remove it",
    "debug.memory_snapshot": "debug.profile records GPU memory too; set debug.profile=1",
}

# {name of a setting in other libraries: its name here}, where the names are not similar
OTHER_LIBRARIES = {
    "learning_rate": "optim.lr",
    "batch_size": "train.micro_batch_size",
    "max_steps": "train.steps",
    "num_workers": "data.workers",
    "gradient_accumulation_steps": "train.accumulation_steps",
}


def removal_note(key: str) -> str:
    """What to do instead of a removed setting; "" for other keys."""
    instead = REMOVED.get(re.sub(r"^data\.sources\.\w+\.", "data.", key), "")
    return instead and f" is no longer a setting: {instead}"


def unknown_key_text(key: str, source: str, known: Sequence[str]) -> str:
    if note := removal_note(key):
        return f"{key} {source}{note}"
    start = f"unknown key {key} {source}"
    if key in ("nproc_per_node", "nnodes", "standalone"):
        return f"{start}: it is an option of torchrun and of dist_amp launch, which start the ranks"
    name = key.lower().rpartition(".")[2]
    if key.startswith("task.args."):
        names = [arg.removeprefix("task.args.") for arg in known if "task.args." in arg]
        if near := nearest_name(name, names):
            return f"{start}; did you mean task.args.{near}?"
        return f"{start}; the task takes {', '.join(names) or 'no arguments'}"
    same_name = [path for path in known if path.endswith(f".{name}")]
    near = OTHER_LIBRARIES.get(name) or nearest_name(key.lower(), known)
    if len(same_name) == 1:
        near = same_name[0]
    return f"{start}; did you mean {near}?" if near else f"{start}; --help lists every key"


def expected_text(problems: Sequence[Any], value: str) -> str:
    """What pydantic expects, such as "a valid integer or 'off'", and the most similar choice."""
    expected = []
    for problem in problems:
        text = re.sub("^(Input|String) should (be|have) ", "", problem["msg"])
        if problem["type"] == "missing":  # an item of a list
            text = "more values"
        elif problem["type"] == "needs_python_object":
            text = "left out, as no setting can have its type; set it in the task"
        expected.append(text.replace("a valid array", "values, separated by spaces"))
    text = " or ".join(dict.fromkeys(expected))
    choices = re.findall(r"'([^']+)'", text)
    if near := nearest_name(value.strip('"').lower(), choices):
        text += f"; did you mean {near}?"
    return text
