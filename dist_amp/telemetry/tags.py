"""Every TensorBoard tag with its unit and meaning, and the tags that are only TensorBoard's: others in readable units.

A tag that TAGS describes has its text behind the info mark of its chart. A `*` stands for any characters.
"""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

OVER_RANKS = "over the ranks: min, median and max"

TAGS: dict[str, tuple[str, str]] = {
    # tag: (unit, meaning); per interval: over the steps since the last log step
    "train/loss": ("loss per unit of weight", "weighted mean over the interval's applied steps and all ranks"),
    "train/grad_norm": ("L2 norm", "of all gradients in the last step, unscaled and before clipping"),
    "train/lr": ("learning rate", "of the last step; a parameter group's is this times its lr_scale"),
    "train/lr_*": ("learning rate", "of a parameter group, where groups differ"),
    "train/clipped_share": ("share, 0 to 1", "of the interval's steps: applied, with a norm above train.max_grad_norm"),
    "train/epoch": ("epochs", "samples seen over the samples of the training split"),
    "train/samples_seen": ("samples", "by all ranks since step 0"),
    "train/tokens_seen": ("tokens", "by all ranks since step 0"),
    "train/padding_pct": ("%", "of the places in all ranks' batches, since the last log step, that are padding"),
    "train/counted_pct": ("%", "of all ranks' tokens since the last log step that the loss counts"),
    "train/counted_pct_*": ("%", "of all ranks' counted tokens since the last log step that are of this source"),
    "train/*": ("the task's", "returned by the task's train_metrics, of this rank"),
    "eval/loss": ("loss per unit of weight", "weighted mean over the held-out samples and all ranks"),
    "eval/loss_*": ("loss per unit of weight", "of one source of a mixture: over its held-out tokens and all ranks"),
    "eval/*": ("the task's", "returned by the task's metrics, weighted mean over the held-out samples and all ranks"),
    "throughput/items_per_second": ("samples/s", "of this rank; without evaluation and checkpoints"),
    "throughput/tokens_per_second": ("tokens/s", "of this rank; without evaluation and checkpoints"),
    "throughput/mfu": ("share, 0 to 1", "model FLOPs utilisation of this rank's device"),
    "perf/mfu_pct": ("%", "model FLOPs utilisation of this rank's device: 100 x throughput/mfu"),
    "memory/peak_bytes": ("bytes", "highest since the start: of torch's allocator; of the process on a CPU"),
    "memory/peak_GiB": ("GiB", "highest since the start: of torch's allocator; of the process on a CPU"),
    "memory/allocated_bytes": ("bytes", "now: of torch's allocator; the process's resident set on a CPU"),
    "memory/reserved_bytes": ("bytes", "what torch's allocator holds of the GPU, in use or not"),
    "memory/allocator_retries": ("count since the start", "how often the allocator had to free memory and ask again"),
    "time/step_seconds": ("s", "mean time of a step, without evaluation and checkpoints"),
    "time/local_seconds": ("s", "of a step: what this rank does itself, without waiting for others or writing logs"),
    "time/data_wait_seconds": ("s", "of a step: waiting for this rank's micro-batches"),
    "time/forward_seconds": ("s", "of a step: forward and loss of all micro-batches"),
    "time/backward_seconds": ("s", "of a step: backward of all micro-batches"),
    "time/optimizer_seconds": ("s", "of a step: norm, clipping and update, with Muon's gathers"),
    "time/communication_wait_seconds": (
        "s",
        "of a step: waiting for other ranks, and sending that is not hidden",
    ),
    "time/other_seconds": ("s", "of a step: callbacks, checks and logs; in the first interval also what is done once"),
    "time/checkpoint_stall_seconds": ("s", "of the interval: training waited for a checkpoint"),
    "time/evaluation_seconds": ("s", "of the interval: evaluation, with the task's sample"),
    "time/diagnostics_seconds": ("s", "of the interval: replays, measurements and traces that were asked for"),
    "perf/goodput_pct": ("%", "of the run folder's life in which steps were applied, restarts and stops included"),
    "memory/host_rss_GiB": ("GiB", "this rank's process: its resident set"),
    "host/memory_used_GiB": ("GiB", "of this rank's machine, or of its container's limit; by its first rank"),
    "host/available_GiB": ("GiB", "that programs on this rank's machine may still take; by its first rank"),
    "gpu/sm_clock_MHz": ("MHz", "the clock of the GPU's multiprocessors"),
    "gpu/memory_clock_MHz": ("MHz", "the clock of the GPU's memory"),
    "gpu/power_W": ("W", "the GPU's power draw"),
    "gpu/power_limit_W": ("W", "the GPU's power limit"),
    "gpu/temperature_C": ("degrees C", "of the GPU"),
    "gpu/utilisation_pct": ("%", "of the time in which a kernel ran"),
    "gpu/throttled": (
        "0 or 1",
        "clocks are lowered by heat, the power supply or a fault, which a warning names",
    ),
    "gpu/power_capped": ("0 or 1", "clocks are lowered to stay below the power limit: usual for a busy GPU"),
    "gpu/ecc_uncorrected": ("count", "uncorrected memory errors since the run's start"),
    "gpu/ecc_uncorrected_lifetime": ("count", "uncorrected memory errors of the GPU's life"),
    "amp/loss_scale": ("factor", "the GradScaler's; 1 without scaling"),
    "amp/loss_scale_log2": ("power of 2", "log2 of the GradScaler's loss scale; 0 without scaling"),
    "amp/skipped_steps": ("steps since the start", "skipped on all ranks, because gradients were not finite"),
    "amp/skipped_in_interval": ("steps", "skipped on all ranks since the last log step"),
    "ranks/items_per_second_*": ("samples/s", OVER_RANKS),
    "ranks/peak_bytes_*": ("bytes", OVER_RANKS),
    "ranks/slowest_rank": ("rank", "the one with the largest time/local_seconds; above 64 ranks"),
    "ranks/*_seconds_*": ("s", f"as time/*, {OVER_RANKS}"),
    "numerics/underflow_share/*": ("share, 0 to 1", "of a group's gradients that become zero in fp16 only"),
    "numerics/lost_update_share/*": ("share, 0 to 1", "of a group's elements that the update leaves as they are"),
}


def describe(tag: str) -> str:
    """`unit: meaning` of a tag; "" for one that TAGS does not have."""
    known = TAGS.get(tag) or next((text for pattern, text in TAGS.items() if fnmatchcase(tag, pattern)), None)
    return f"{known[0]}: {known[1]}" if known else ""


def in_readable_units(values: Mapping[str, float]) -> dict[str, float]:
    """Tags that TensorBoard gets besides `values`: percent, GiB and powers of 2. metrics.jsonl has only the others."""
    tags = {}
    if (mfu := values.get("throughput/mfu")) is not None:
        tags["perf/mfu_pct"] = 100 * mfu
    if (peak := values.get("memory/peak_bytes")) is not None:
        tags["memory/peak_GiB"] = peak / 2**30
    if (scale := values.get("amp/loss_scale", 0.0)) > 0:
        tags["amp/loss_scale_log2"] = math.log2(scale)
    return tags
