"""How TensorBoard shows a run: tags' units and meanings, readable units, six pinned charts."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

PORT = 6006  # TensorBoard's own default

# A colour per rank of a single run; with --logdir runs one per run, since TensorBoard's seven can't
# tell 2 x 8 apart.
COLOURS = r"regex:^(.+)/tensorboard/|(rank\d+)$"

# tag | unit | meaning. A `*` in a tag stands for any characters; the first tag that matches counts.
# An interval is the steps since the last log step.
TABLE = """
train/loss | loss per unit of weight | weighted mean over the interval's applied steps and all ranks
train/grad_norm | L2 norm | of all gradients in the last step, unscaled and before clipping
train/lr | learning rate | of the last step; a parameter group's is this times its lr_scale
train/lr_* | learning rate | of a parameter group, where groups differ
train/clipped_share | share, 0 to 1 | of the interval's steps: norm above train.max_grad_norm
train/epoch | epochs | samples seen over the samples of the training split
train/samples_seen | samples | by all ranks since step 0
train/tokens_seen | tokens | by all ranks since step 0
train/padding_pct | % | of the tokens in all ranks' batches since the last log step: padding
train/counted_pct | % | of all ranks' tokens since the last log step that the loss counts
train/counted_pct_* | % | of all ranks' counted tokens since the last log step: of this source
train/* | the task's | returned by the task's train_metrics, of this rank
eval/loss | loss per unit of weight | weighted mean over the held-out samples and all ranks
eval/loss_* | loss per unit of weight | of one source of a mixture, over its held-out tokens
eval/* | the task's | of its metrics: weighted mean over the held-out samples and all ranks
throughput/items_per_second | samples/s | of this rank; without evaluation and checkpoints
throughput/tokens_per_second | tokens/s | of this rank; without evaluation and checkpoints
throughput/mfu | share, 0 to 1 | model FLOPs utilisation of this rank's device
perf/mfu_pct | % | model FLOPs utilisation of this rank's device: 100 x throughput/mfu
memory/peak_bytes | bytes | highest since the start: of torch's allocator; on a CPU of the process
memory/peak_GiB | GiB | highest since the start: of torch's allocator; on a CPU of the process
memory/allocated_bytes | bytes | now: of torch's allocator; the process's resident set on a CPU
memory/reserved_bytes | bytes | what torch's allocator holds of the GPU, in use or not
memory/allocator_retries | count since the start | the allocator freed memory and asked again
time/step_seconds | s | mean time of a step, without evaluation and checkpoints
time/local_seconds | s | of a step: this rank's work, without waiting for others or writing logs
time/data_wait_seconds | s | of a step: waiting for this rank's micro-batches
time/forward_seconds | s | of a step: forward and loss of all micro-batches
time/backward_seconds | s | of a step: backward of all micro-batches
time/optimizer_seconds | s | of a step: norm, clipping and update, with Muon's gathers
time/communication_wait_seconds | s | of a step: waiting for other ranks, and exposed communication
time/other_seconds | s | of a step: callbacks, checks, logs; at first also one-time work
time/checkpoint_stall_seconds | s | of the interval: training waited for a checkpoint
time/evaluation_seconds | s | of the interval: evaluation, with the task's sample
time/diagnostics_seconds | s | of the interval: replays, measurements and traces that were asked for
perf/goodput_pct | % | of the run folder's life spent in applied steps, restarts and stops included
memory/host_rss_GiB | GiB | this rank's process: its resident set
host/memory_used_GiB | GiB | of this rank's machine, or of its container's limit; by its first rank
host/available_GiB | GiB | that programs on this rank's machine may still take; by its first rank
gpu/sm_clock_MHz | MHz | the clock of the GPU's multiprocessors
gpu/memory_clock_MHz | MHz | the clock of the GPU's memory
gpu/power_W | W | the GPU's power draw
gpu/power_limit_W | W | the GPU's power limit
gpu/temperature_C | degrees C | of the GPU
gpu/utilisation_pct | % | of the time in which a kernel ran
gpu/throttled | 0 or 1 | clocks are lowered by heat, power supply or a fault, which a warning names
gpu/power_capped | 0 or 1 | clocks are lowered to stay below the power limit: usual for a busy GPU
gpu/ecc_uncorrected | count | uncorrected memory errors since the run's start
gpu/ecc_uncorrected_lifetime | count | uncorrected memory errors of the GPU's life
amp/loss_scale | factor | the GradScaler's; 1 without scaling
amp/loss_scale_log2 | power of 2 | log2 of the GradScaler's loss scale; 0 without scaling
amp/skipped_steps | steps since the start | skipped on all ranks, because gradients were not finite
amp/skipped_in_interval | steps | skipped on all ranks since the last log step
ranks/items_per_second_* | samples/s | over the ranks: min, median and max
ranks/peak_bytes_* | bytes | over the ranks: min, median and max
ranks/slowest_rank | rank | the one with the largest time/local_seconds; above 64 ranks
ranks/*_seconds_* | s | as time/*, over the ranks: min, median and max
numerics/underflow_share/* | share, 0 to 1 | of a group's gradients that become zero in fp16 only
numerics/lost_update_share/* | share, 0 to 1 | of a group's elements that the update does not change
"""

TAGS: dict[str, tuple[str, str]] = {
    tag: (unit, meaning)
    for tag, unit, meaning in (line.split(" | ") for line in TABLE.strip().splitlines())
}


def describe(tag: str) -> str:
    """`unit: meaning` of a tag; "" for one that the table does not have."""
    for pattern, (unit, meaning) in TAGS.items():
        if fnmatchcase(tag, pattern):
            return f"{unit}: {meaning}"
    return ""


def in_readable_units(values: Mapping[str, float]) -> dict[str, float]:
    """Tags that TensorBoard gets besides `values`, and metrics.jsonl not: percent, GiB, 2^n."""
    tags = {}
    if "throughput/mfu" in values:
        tags["perf/mfu_pct"] = 100 * values["throughput/mfu"]
    if "memory/peak_bytes" in values:
        tags["memory/peak_GiB"] = values["memory/peak_bytes"] / 2**30
    if values.get("amp/loss_scale", 0.0) > 0:
        tags["amp/loss_scale_log2"] = math.log2(values["amp/loss_scale"])
    return tags


def main_tags(has_tokens: bool) -> dict[str, list[str]]:
    """{title: tags}: the charts to look at first. The first tag of each is pinned."""
    what = "tokens" if has_tokens else "items"
    return {
        "loss": ["train/loss", "eval/loss"],
        f"{what} per second, of each rank": [f"throughput/{what}_per_second"],
        "peak memory of each rank (GiB)": ["memory/peak_GiB"],
        "time of a step (s)": ["time/step_seconds"],
        "loss scale (power of 2)": ["amp/loss_scale_log2"],
        "skipped steps per interval": ["amp/skipped_in_interval"],
    }


def pinned_url(has_tokens: bool, port: int = PORT) -> str:
    """TensorBoard's address with the main charts pinned above all others."""
    cards = [{"plugin": "scalars", "tag": tags[0]} for tags in main_tags(has_tokens).values()]
    query = {
        "pinnedCards": json.dumps(cards, separators=(",", ":")),
        "runColorGroup": COLOURS,
        "smoothing": "0",  # the default of 0.6 hides the steps of the scale and single skips
    }
    return f"http://localhost:{port}/?{urlencode(query, safe=':,/', quote_via=quote)}#timeseries"


def watch_line(folder: Path, has_tokens: bool) -> str:
    """The banner's lines on how to watch a run, alone or beside others."""
    command = f"tensorboard --logdir {folder}/tensorboard"
    if folder.parent.name:
        command += f"; beside other runs: --logdir {folder.parent}"
    return f"watch  {command}\n       {pinned_url(has_tokens)}"


def add_overview(has_tokens: bool) -> Callable[[Any], None]:
    """Writes the layout "Overview" of the custom-scalars dashboard with torch's SummaryWriter."""
    charts = {
        title: ["Multiline", [f"^{tag}$" for tag in tags]]
        for title, tags in main_tags(has_tokens).items()
    }
    return lambda writer: writer.add_custom_scalars({"Overview": charts})


def describe_new(values: Iterable[Any], described: set[str], file: Any, step: int) -> None:
    """Add the values whose tags a file has not described yet, with their units and meanings.

    As tensors: TensorBoard's default loader drops the description of any other value
    (tensorboard-data-server 0.7.2). The same values follow in their usual form, for those who read
    the files with EventAccumulator.Scalars.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.data_compat import migrate_value

    summary = Summary()
    for value in values:
        if value.tag in described:
            continue
        described.add(value.tag)
        text = describe(value.tag)
        if text:
            copy = Summary.Value.FromString(value.SerializeToString())
            copy.metadata.display_name = value.tag
            copy.metadata.summary_description = text
            summary.value.append(migrate_value(copy))
    if summary.value:
        file.add_summary(summary, step)
