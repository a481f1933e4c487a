"""Settings and task methods that need an optional feature; an error if this project lacks it."""

from typing import Any

from dist_amp.errors import ConfigError
from dist_amp.files import missing, present

# (setting, its values that work without the feature, the feature that all other values need)
SETTINGS = (
    ("compile.blocks", ("auto", False), "scaling.compile"),
    ("compile.mode", ("default",), "scaling.compile"),
    ("data.group_by_length", ("off",), "loading.length_groups"),
    ("data.on_bad_sample", ("stop",), "loading.bad_samples"),
    ("debug.audit_every", ("off",), "diagnostics.audit"),
    ("debug.nonfinite", ("log", "off"), "diagnostics.nonfinite_replay"),
    ("debug.numerics", (False,), "diagnostics.numerics"),
    ("debug.profile", ("off",), "diagnostics.profiling"),
    ("metrics.fingerprint", ("off",), "diagnostics.fingerprint"),
    ("metrics.peak_flops", ("auto",), "telemetry.mfu"),
    ("optim.ema", ("off",), "optimizers.ema"),
    ("optim.name", ("adamw", "sgd"), "optimizers.muon"),
    ("parallel.activation_checkpointing", ("none",), "scaling.activation_checkpointing"),
    ("parallel.bit_exact", (False,), "bit_exact"),
    ("precision.dtype", ("auto", "bf16", "fp16"), "scaling.float8"),
    ("run.eviction_notice", ("auto", "off"), "supervise.eviction"),
    ("run.observers", ((),), "supervise.callbacks"),
)
METHODS = (  # (method of a task, the feature that it needs)
    ("observers", "supervise.callbacks"),
    ("on_step", "supervise.callbacks"),
    ("train_metrics", "supervise.callbacks"),
    ("sample", "supervise.sampling"),
)


def check_features(config: Any, task: type) -> None:
    """Raises ConfigError if a setting or the task needs a feature that this project lacks."""
    for key, without, feature in SETTINGS:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value not in without and not present(feature):
            raise ConfigError(f"{key}={value}: {missing(feature)}, or use {key}={without[0]}")
    if "://" in config.run.dir and not present("storage"):
        raise ConfigError(f"run.dir={config.run.dir}: {missing('storage')}, or use a local folder")
    # The package's own tasks have these methods whether or not the feature is present.
    for name, feature in () if task.__module__.startswith("dist_amp.") else METHODS:
        if getattr(task, name, False) and not present(feature):
            raise ConfigError(
                f"nothing would call the task's {name}: {missing(feature)}, or rename the method"
            )
