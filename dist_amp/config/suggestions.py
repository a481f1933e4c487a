"""What an unknown key may be meant for, and what became of the settings of earlier releases."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dist_amp.errors import ConfigError, nearest_name

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

# Of torchrun, which are often given to the main job.
OF_LAUNCHERS = """
    nproc nproc_per_node nnodes node_rank num_gpus gpus max_restarts master_addr master_port
    rdzv_backend rdzv_endpoint rdzv_id standalone
""".split()

# The words around the choices in "a whole number or auto", "one of bf16, fp16".
NO_CHOICES = set("a whole number one of or and text at least most above below finite".split())


def suggestion(key: str, known: Sequence[str]) -> str:
    """The end of the error for an unknown key: a removed or similar setting, or where to look."""
    if removed := REMOVED.get(_of_single_source(key)):
        return f" is no longer a setting: {removed}"
    if key in OF_LAUNCHERS:
        return ": it is an option of torchrun and of dist_amp launch, which starts the ranks"
    section, _, name = key.lower().rpartition(".")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    if alias := nearest_name(name, ELSEWHERE, 0.8):
        near = ELSEWHERE[alias]
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


def check_unknown(words: Sequence[str], known: Iterable[str]) -> None:
    """Errors: ConfigError for what is almost an option."""
    for word in words:
        name = word.partition("=")[0]
        is_known = name in known or f"--{name[2:].replace('-', '_')}" in known
        if not name.startswith("--") or "." in name or is_known:
            continue
        if near := nearest_name(name, known, 0.8):
            raise ConfigError(f"unknown option {name}; did you mean {near}?")


def with_dashes(words: Sequence[str]) -> str:
    """What to write for a key without dashes at the beginning of these words; "" for no key."""
    key, equals, value = words[0].partition("=")
    if not re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", key) or key.endswith(".py"):
        return ""
    if not equals:
        value = "".join(words[1:2]) or "VALUE"
    return f"write --{key}={value}"


def for_value(words: Sequence[str], rule: str, default: Any) -> str:
    """The end of the error for a wrong value: the nearest choice, or an example, by its default."""
    choices = set(re.findall(r"\b[A-Za-z][\w-]*", rule)) - NO_CHOICES
    if words and (near := nearest_name(words[0].lower(), choices)):
        return f"; did you mean {near}?"
    for at in range(1, len(words)):
        if hint := with_dashes(words[at:]):
            return f"; {hint}"
    if isinstance(default, list | tuple) and default:
        return f", as in {' '.join(map(str, default))}"
    return ""


def up_to_date(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with renamed values; removed keys of a run's own config.toml are left out."""
    kept = {}
    for key, setting in settings.items():
        is_of_a_run = re.search(r"(^in |/)config\.toml, line", setting.source)
        if is_of_a_run and _of_single_source(key) in REMOVED:
            continue
        kept[key] = setting
        if new_value := RENAMED_VALUES.get((key, " ".join(setting.words))):
            kept[key] = replace(setting, words=(new_value,))
    return kept


def _of_single_source(key: str) -> str:
    """data.sources.wiki.path -> data.path; other keys as they are."""
    return re.sub(r"^data\.sources\.\w+\.", "data.", key)
