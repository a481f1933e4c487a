"""The ends of the errors for a wrong key or value: what it may be meant for, and what is accepted.

Imported once there is one.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from dist_amp.config.values import (
    INVALID,
    Setting,
    as_word,
    first_valid,
    from_words,
    kinds_of,
    parts_of,
)
from dist_amp.errors import ConfigError, nearest_name

# Removed settings, and what to do now.
REMOVED = {
    "data.revision": "append it to data.name, as user/name@REVISION",
    "data.validation_fraction": "set data.validation_split to it",
    "data.mix_by": "the weights of a mixture count rows; remove it",
    "data.map_up_to_gib": "set data.view=parquet, or data.view=map",
    "data.max_bad_samples": "give data.on_bad_sample this number",
    "data.max_repeats": "a source whose rows come more than 20 times is warned of; remove it",
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
OF_LAUNCHERS = """
    nproc nproc_per_node nnodes node_rank num_gpus gpus max_restarts master_addr master_port
    rdzv_backend rdzv_endpoint rdzv_id standalone
""".split()

IN_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "None",
    "array": "values, separated by spaces",
    "object": "left out, as no setting can be a dict; take its values as arguments of their own",
}
NOT_A_SETTING = "left out, as no setting can have its type; set it in the task"
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def removed(key: str) -> str:
    """What became of a setting of an earlier release; "" for other keys."""
    instead = REMOVED.get(re.sub(r"^data\.sources\.\w+\.", "data.", key), "")
    return instead and f" is no longer a setting: {instead}"


def suggestion(key: str, known: Sequence[str]) -> str:
    """The end of the error for an unknown key: a removed or similar setting, or where to look."""
    if text := removed(key):
        return text
    if key in OF_LAUNCHERS:
        return ": it is an option of torchrun and of dist_amp launch, which starts the ranks"
    section, _, name = key.lower().rpartition(".")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    near = nearest_name(key.lower(), known)
    if alias := nearest_name(name, ELSEWHERE, 0.8):
        near = ELSEWHERE[alias]
    elif sibling := nearest_name(name, siblings):
        near = f"{section}.{sibling}"
    elif len(namesakes) == 1:
        near = namesakes[0]
    elif section == "task.args":
        return f"; the task takes {', '.join(siblings) or 'no arguments'}"
    return f"; did you mean {near}?" if near else "; --help lists every key"


def with_dashes(words: Sequence[str]) -> str:
    """What to write for a key without dashes at the beginning of these words; "" for no key."""
    key, equals, value = words[0].partition("=")
    if not re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)+", key) or key.endswith(".py"):
        return ""
    if not equals:
        value = "".join(words[1:2]) or "VALUE"
    return f"write --{key}={value}"


def check_unknown(words: Sequence[str], known: Iterable[str]) -> None:
    """Errors: ConfigError for what is almost an option."""
    for word in words:
        name = word.partition("=")[0]
        is_known = name in known or f"--{name[2:].replace('-', '_')}" in known
        if not name.startswith("--") or "." in name or is_known:
            continue
        if near := nearest_name(name, known, 0.8):
            raise ConfigError(f"unknown option {name}; did you mean {near}?")


# ---- values


def rule_for(hint: Any, setting: Setting, default: Any) -> str:
    """What a type accepts, and the nearest choice, an example or what else may be meant."""
    kinds = kinds_of(hint)
    rule = rule_of(hint, setting.typed[-1 if "array" in kinds else 0])
    if '"' in json.dumps(setting.typed, default=repr) and not setting.untyped:  # a text of a file
        unquoted = from_words(setting.words, setting.source).typed
        if first_valid(hint, unquoted) is not INVALID:
            rule += ", without quotes"
    choices = [choice for part in parts_of(hint) for choice in choices_of(part)]
    if "boolean" in kinds:
        choices += ["true", "false"]
    words = setting.words
    if words and (near := nearest_name(words[0].lower(), choices)):
        return f"{rule}; did you mean {near}?"
    for at in range(1, len(words)):
        if fix := with_dashes(words[at:]):
            return f"{rule}; {fix}"
    if isinstance(default, list | tuple) and default:
        return f"{rule}, as in {' '.join(map(str, default))}"
    return rule


def rule_of(hint: Any, reading: Any) -> str:
    """Such as "a whole number or auto", and for a number that is out of range "at least 1 or auto".

    reading: what the type does not accept.
    """
    if isinstance(reading, list) and get_origin(hint) in (list, tuple):
        items = [item for item in get_args(hint) if item is not ...]
        if len(items) == 1:
            items *= len(reading)
        for kind, item in zip(items, reading, strict=False):
            if len(items) == len(reading) and first_valid(kind, [item]) is INVALID:
                return rule_of(kind, item)
    is_number = isinstance(reading, int | float) and not isinstance(reading, bool)
    parts = parts_of(hint)
    if is_number and any(map(bounds_of, parts)):
        parts = [part for part in parts if part.get("type") != "string" or choices_of(part)]
    rules = []
    for part in parts:
        choices = choices_of(part)
        bounds = bounds_of(part)
        if choices:
            rules.append(choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
        elif bounds and is_number and (part["type"] == "number" or isinstance(reading, int)):
            finite = [] if abs(reading) <= sys.float_info.max else ["finite"]
            rules.append(" and ".join([*finite, *bounds]))
        elif "prefixItems" in part:
            rules.append(f"{len(part['prefixItems'])} values, separated by spaces")
        else:
            rules.append(IN_WORDS.get(part.get("type", ""), NOT_A_SETTING))
    return " or ".join(dict.fromkeys(rules))


def choices_of(part: Mapping[str, Any]) -> list[str]:
    """The values of a Literal or an Enum."""
    values = part.get("enum", [part["const"]] if "const" in part else [])
    return list(map(as_word, values))


def bounds_of(part: Mapping[str, Any]) -> list[str]:
    """Such as ["at least 0", "below 1"]."""
    return [f"{words} {part[name]:g}" for name, words in BOUNDS.items() if name in part]
