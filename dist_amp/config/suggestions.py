"""What an unknown key may be meant for, and what became of the settings of earlier releases."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_amp.errors import nearest_name

# Removed settings, and what to do now.
REMOVED = {
    "data.revision": "append it to data.name, as user/name@REVISION",
    "data.validation_fraction": "set data.validation_split to it",
    "data.mix_by": "the weights of a mixture count rows; remove it",
    "data.map_up_to_gib": "set data.view=parquet, or data.view=map",
    "data.shuffle_groups": "the rows of two row groups are shuffled together; remove it",
    "precision.scaler.min_scale": "a run ends if its loss scale falls below 1; remove it",
    "compile.backend": "set compile.mode=aot_eager or eager to generate no code, or remove it",
    "compile.fullgraph": "graph breaks are reported and allowed; remove it",
    "compile.dynamic": "set compile.blocks=dynamic, or remove it",
    "train.gc_every": "garbage collection no longer scans the model; remove it",
    "optim.decay_ratio": "wsd decays in the last fifth; a task's schedule(step) can differ",
    "debug.ranks": "debug.profile records all ranks; remove it",
    "debug.check_every": "ranks are compared every 100 steps; remove it",
    "debug.memory_snapshot": "debug.profile records GPU memory too; set debug.profile=1",
}
RENAMED_VALUES = {("checkpoint.on_failure", "go_on"): "continue"}

# What other libraries call a setting, where no name here is like it.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "train.micro_batch_size",
    "max_steps": "train.steps",
    "num_workers": "data.workers",
    "gradient_accumulation_steps": "train.accumulation_steps",
}


def suggestion(key: str, known: Sequence[str]) -> str:
    """The end of the error for an unknown key: the removed or similar setting, else where to look.

    The similar one is looked for in the key's section, then by the same name in another section.
    """
    if removed := REMOVED.get(_of_single_source(key)):
        return f" is no longer a setting: {removed}"
    section, _, name = key.lower().rpartition(".")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    if name in ELSEWHERE:
        near = ELSEWHERE[name]
    elif sibling := nearest_name(name, siblings):
        near = f"{section}.{sibling}"
    elif len(namesakes) == 1:
        near = namesakes[0]
    elif section == "task.args":
        return f"; the task takes {', '.join(siblings) or 'no arguments'}"
    else:
        near = nearest_name(key.lower(), known)
    if near:
        return f"; did you mean {near}?"
    return "; --help lists every key"


def up_to_date(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with renamed values; removed keys of a run's own config.toml are left out."""
    kept = {}
    for key, setting in settings.items():
        is_of_a_run = Path(setting.source.removeprefix("in ")).name == "config.toml"
        if is_of_a_run and _of_single_source(key) in REMOVED:
            continue
        kept[key] = setting
        if new_value := RENAMED_VALUES.get((key, " ".join(setting.words))):
            kept[key] = replace(setting, words=(new_value,))
    return kept


def _of_single_source(key: str) -> str:
    """data.sources.wiki.path -> data.path; other keys as they are."""
    return re.sub(r"^data\.sources\.\w+\.", "data.", key)
