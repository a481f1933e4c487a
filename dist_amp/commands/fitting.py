"""What fits into a device: the least change of a config that does, and the largest micro-batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dist_amp.commands.strategies import Job, batch_of, plan_strategy
from dist_amp.config.auto import SHARDED
from dist_amp.errors import Failure
from dist_amp.settings import Config, Strategy

LARGEST = 2**16  # micro-batches beyond it are not tried


def settings_that_fit(strategy: Strategy, job: Job) -> str:
    """The least costly change that fits, as a command line; "" if none does."""
    for settings in changes(strategy, job):
        if fitting(settings["parallel.strategy"], job, settings):
            return " ".join(f"--{key} {str(value).lower()}" for key, value in settings.items())
    return ""


def changes(strategy: Strategy, job: Job) -> Iterator[dict[str, Any]]:
    """Settings that take less memory than the config's, the least costly first."""
    strategies = [strategy]
    if strategy == "ddp":
        strategies.append("fsdp")
    for used in strategies:
        first = {"parallel.strategy": used}
        for kept in ("none", "selective", "full"):
            second = first | {"parallel.activation_checkpointing": kept}
            if (used, kept) != (strategy, "none"):
                yield second
    size, rounds = job.config.train.micro_batch_size, job.micro_batches
    last: dict[str, Any] = {
        "parallel.strategy": used,
        "parallel.activation_checkpointing": "full",
    }
    while size % 2 == 0:
        size //= 2
        rounds *= 2
        last = {**last, "train.micro_batch_size": size}
        if job.config.train.global_batch_size == "auto":
            last["train.accumulation_steps"] = rounds
        yield last
    if used in SHARDED:
        yield last | {"parallel.cpu_offload": True}


def largest_micro_batch(strategy: Strategy, job: Job) -> int:
    """The largest train.micro_batch_size that fits, within 1/16; 0 if none does."""

    def fits(size: int) -> bool:
        return fitting(strategy, job, {"train.micro_batch_size": size})

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > LARGEST:
            return low
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fitting(strategy: Strategy, job: Job, settings: dict[str, Any]) -> bool:
    """Whether the config fits with these settings."""
    config = with_settings(job.config, settings)
    size = config.train.micro_batch_size
    batch = job.batch
    if size != job.config.train.micro_batch_size and batch is not None:
        batch = batch_of(config, job.task, job.dataset)
    world = replace(job.world, notes=[])
    changed = replace(job, config=config, world=world, batch=batch)
    try:
        return bool(plan_strategy("", strategy, changed)[0].fits)
    except Failure:
        return False


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """The config with these keys set."""
    for key, value in settings.items():
        section, name = key.split(".")
        changed = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: changed})
    return config
