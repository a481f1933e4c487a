"""All settings: a frozen dataclass per section; a type, range, default and docstring per key.

Pydantic reads them. config/values.py checks the values of a run, all at once. config/schema.py
makes the JSON Schema, from which --help is printed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

Count = Annotated[int, Ge(1)]
PositiveFloat = Annotated[float, Gt(0)]
Beta = Annotated[float, Ge(0), Lt(1)]
Strategy = Literal["single", "ddp", "fsdp", "hsdp"]


class Section:
    __pydantic_config__ = {  # noqa: RUF012
        "use_attribute_docstrings": True,
        "extra": "forbid",
        "allow_inf_nan": False,
    }


@dataclass(frozen=True)
class RunConfig(Section):
    dir: str = "auto"
    """The run's folder; auto: `runs/<UTC time>-<id>`, the same on all ranks and in all restarts by
    one torchrun. Set it to continue the run later, or if machines may be replaced. An address such
    as s3://bucket/run keeps the run on object storage.
    """
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """Seed of initial weights, data order and dropout; each rank draws its own dropout masks."""
    deterministic: bool = False
    """Use deterministic kernels only: slower, but bit-identical from run to run."""
    resume: str = "auto"
    """auto: resume from the newest valid checkpoint in run.dir, if any; never: start from scratch;
    or the path of a checkpoint or a run to start from.
    """
    allow_config_change: bool = False
    """Resume even if the data, or settings that affect the result, differ from the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA (or ROCm) if there is a GPU, else the CPU."""
    timeout_seconds: Annotated[float, Gt(0)] = 300.0
    """Timeout of collectives, of a save or a single process without progress, and of the uploads
    at the end.
    """
    eviction_notice: Literal["auto", "off", "aws", "gcp", "azure"] = "auto"
    """The cloud whose eviction notice stops the run, as a signal does; auto: detect it."""
    observers: tuple[str, ...] = ()
    """Your own classes that watch the run, as path/to/file.py:Class or module:Class."""


@dataclass(frozen=True)
class TaskConfig(Section):
    target: str = "dist_amp.tasks.causal_lm:CausalLM"
    """The task's class, as module:Class or path/to/file.py:Class."""
    args: Any = field(default_factory=dict)
    """The task's constructor arguments."""


@dataclass(frozen=True)
class SourceConfig(Section):
    """The keys of [data], and of each source of a mixture."""

    name: str = "auto"
    """A dataset on the Hugging Face hub: user/name, user/name:configuration, or either followed by
    @revision (a branch, tag or commit); auto: the dataset that the task ships with.
    """
    path: Annotated[str, MinLen(1)] = "off"
    """Instead of data.name: a file, folder or glob, local or at an address that fsspec supports,
    such as s3://bucket/*.parquet. The file extensions tell the format.
    """
    split: str = "train"
    """The split to train on."""
    validation_split: Annotated[float, Gt(0), Lt(1)] | str = "auto"
    """A split to evaluate on; or a random fraction of the rows of `split`, such as 0.1; last:0.1:
    its last tenth; last: its last 5 %; auto: "validation" or "test" if there is one, else 0.05.
    """
    text_column: str = "text"
    """The column that holds the text."""


@dataclass(frozen=True)
class MixedSourceConfig(SourceConfig):
    weight: PositiveFloat = 1.0
    """This source's share of the mixture is its weight over the sum of all weights."""


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    sources: Mapping[str, MixedSourceConfig] = field(default_factory=dict)
    """A mixture of sources, instead of data.name or data.path: a table data.sources.NAME per
    source, with the keys above and a weight.
    """
    view: Literal["auto", "parquet", "map"] = "auto"
    """parquet: read Parquet files by row group; map: convert files once into a memory-mapped
    dataset; auto: map, but Parquet files of more than 4 GiB by row group.
    """
    streams: Count | Literal["auto"] = "auto"
    """view=parquet: how many streams the row groups are divided into, a multiple of the number of
    ranks, which share the streams; auto: about 64, or fewer if there are few row groups.
    """
    tokenizer: str = "auto"
    """A tokenizer's file, folder or model on the hub, or bytes; auto: the task's tokenizer."""
    pack: Literal["auto", "off", "cut", "best_fit"] = "auto"
    """How documents become rows of one length. cut: concatenated and cut; best_fit: whole documents
    packed together, with no cross-document attention; off: one padded document per row; auto: the
    task's default.
    """
    group_by_length: Count | Literal["off"] = "off"
    """Length bucketing: form batches from samples of similar length within a window of so many
    steps, which saves padding; off: no bucketing.
    """
    on_bad_sample: Count | Annotated[float, Gt(0), Lt(1)] | Literal["stop", "skip"] = "stop"
    """What to do with a sample that can't be read, augmented or collated. stop: end the run; skip:
    leave it out, list it in RUN/bad_samples/, and end the run after more than 100 in an epoch; a
    number: skip with this limit instead of 100; below 1, it is a fraction of the samples.
    """
    workers: Annotated[int, Ge(0)] = 0
    """Loader processes per rank; 0: batches are prepared in the training process."""
    shuffle: bool = True
    """Reshuffle every epoch; false: keep the dataset's order."""
    drop_last: bool = False
    """Drop an epoch's last samples if they are fewer than global_batch_size."""

    @property
    def most_bad_samples(self) -> float:
        """Limit of bad samples in an epoch; below 1, a fraction of the samples."""
        if isinstance(self.on_bad_sample, str):
            return 100 if self.on_bad_sample == "skip" else 0
        return self.on_bad_sample


@dataclass(frozen=True)
class ScalerConfig(Section):
    init_scale: Annotated[float, Ge(1)] = 65536.0
    """The initial loss scale, which keeps small gradients from vanishing in fp16."""
    growth_factor: Annotated[float, Gt(1)] = 2.0
    """Multiplies the scale after growth_interval consecutive applied steps."""
    backoff_factor: Annotated[float, Gt(0), Lt(1)] = 0.5
    """Multiplies the scale after a step that is skipped because gradients are inf or nan."""
    growth_interval: Annotated[int, Ge(1)] = 2000
    """Consecutive applied steps before the scale grows."""


@dataclass(frozen=True)
class PrecisionConfig(Section):
    use_amp: bool = True
    """Mixed precision; false computes everything in float32."""
    dtype: Literal["auto", "bf16", "fp16", "fp8"] = "auto"
    """The dtype of mixed precision. fp16 uses the loss scaler; fp8: bf16, but the blocks' linear
    layers multiply in float8 (torchao), on GPUs of compute capability 8.9 or higher; auto: bf16; or
    float32 on a CPU that only emulates bf16, if no other precision setting is given.
    """
    cast_by: Literal["auto", "autocast", "policy"] = "auto"
    """What casts to dtype: autocast (any strategy) or FSDP2's mixed-precision policy (fsdp, hsdp);
    auto: policy under fsdp and hsdp if the model has no batch norm, else autocast.
    """
    tf32: bool = False
    """Allow TF32 tensor cores (10 bits of mantissa) in float32 matrix products on CUDA."""
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    """The fp16 loss scaler; no effect in bf16 and float32."""

    @property
    def name(self) -> str:
        if not self.use_amp:
            return "fp32"
        return "fp16" if self.dtype == "fp16" else "bf16"


@dataclass(frozen=True)
class ParallelConfig(Section):
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = "auto"
    """single: one process; ddp: a full copy per rank; fsdp: one copy sharded over all ranks; hsdp:
    sharded within each of `replicas` groups; auto: single for one process; ddp if the training
    state fits in half of a GPU's memory; hsdp if in half of one machine's GPU memory; else fsdp.
    """
    replicas: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    """hsdp: the number of copies, each sharded over world_size / replicas ranks; auto: one per
    machine, or two on a single machine.
    """
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp, hsdp: dtype of stored parameters and optimizer moments; bf16 halves their memory, but
    rounding loses small updates.
    """
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fsdp, hsdp: dtype in which gradients are reduced over ranks and accumulated."""
    comm_dtype: Literal["off", "bf16", "fp16"] = "off"
    """ddp: dtype of the gradients' all-reduce; off: float32."""
    accumulate_reduce: Literal["auto", "last", "every"] = "auto"
    """fsdp, hsdp: when to reduce gradients. last: after a step's last micro-batch; each rank holds
    unsharded gradients, 4 bytes per parameter. every: after every micro-batch; gradients stay
    sharded, but more is sent (docs/collectives.md). auto: last if its gradients take up to a
    quarter of a GPU's memory, else every.
    """
    activation_checkpointing: Count | Literal["none", "full", "selective"] = "none"
    """Which blocks recompute their activations in backward. full: all, keeping only their inputs,
    for about a third more computation; selective: all, but keeping the results of matrix products
    and attention, for little more computation; a number n: every n-th block; none: none.
    """
    bit_exact: bool = False
    """Compute the same bits on 1, 2, 4, 8, ... ranks under every strategy, for the same
    global_batch_size and micro_batch_size; costs a reduction per micro-batch: docs/bit_exact.md.
    """
    cpu_offload: bool = False
    """fsdp, hsdp on GPUs: keep parameters, gradients and optimizer state in host memory; in each
    step the host waits for the gradients, then for their global norm.
    """


@dataclass(frozen=True)
class CompileConfig(Section):
    blocks: bool | Literal["auto", "dynamic"] = "auto"
    """Compile each block with torch.compile, identical blocks once; the first step and evaluation
    take seconds to minutes longer. true: once per input shape, up to 8 shapes, and a model without
    blocks as a whole; dynamic: once for all shapes, for batches padded to their longest sample;
    auto: on GPUs with a compiler, and only blocks without graph breaks.
    """
    mode: Literal[
        "default",
        "reduce-overhead",
        "max-autotune",
        "max-autotune-no-cudagraphs",
        "eager",
        "aot_eager",
    ] = "default"
    """Inductor's mode. reduce-overhead and max-autotune replay CUDA graphs; max-autotune also picks
    kernels by timing, so results may differ in the last bits after a resume. eager and aot_eager
    are backends that generate no code, to check quickly that a model can be compiled.
    """


@dataclass(frozen=True)
class TrainConfig(Section):
    steps: Annotated[int, Ge(1), Le(10_000_000)] = 100
    """Optimizer steps to take, counting skipped ones."""
    micro_batch_size: Count = 8
    """Samples per rank in one forward and backward."""
    accumulation_steps: Count | Literal["auto"] = "auto"
    """Micro-batches per rank and step; auto: as many as global_batch_size requires, else 1."""
    global_batch_size: Count | Literal["auto"] = "auto"
    """Samples per step over all ranks; auto: micro_batch_size x ranks x accumulation_steps."""
    clip_by: Literal["norm", "value", "off"] = "norm"
    """Clip gradients by their global norm, by value (each element), or not at all (off)."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """clip_by=norm: the largest global norm that is not clipped."""
    max_grad_value: Annotated[float, Gt(0)] = 1.0
    """clip_by=value: the largest absolute value of a gradient's element."""
    max_skips_in_a_row: Count = 50
    """End the run after this many consecutive skipped steps; checked every metrics.log_every steps.
    """


@dataclass(frozen=True)
class OptimConfig(Section):
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw: Loshchilov & Hutter 2019, arXiv:1711.05101; sgd with momentum; muon: hidden matrices
    by Muon, the rest by AdamW (optimizers/muon.py). A task's optimizer(groups, lr) takes its place.
    """
    lr: PositiveFloat = 3e-4
    """The peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How lr decays from the end of the warm-up to the last step; wsd: constant, then linear over
    the last fifth of train.steps (Hu et al. 2024, arXiv:2404.06395). A task's schedule(step) takes
    its place.
    """
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Applied steps over which lr rises linearly from zero."""
    min_lr_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """The learning rate at the end of the schedule, as a fraction of lr."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay of matrices; vectors (biases, norms) are not decayed. With sgd it is
    added to the gradient.
    """
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's term for numerical stability."""
    momentum: Beta = 0.9
    """Momentum of sgd, and of muon, where 0.95 is usual."""
    fused: bool = True
    """One fused kernel unscales, clips, and steps or skips, with no host-device sync; false:
    gradients are unscaled and clipped before the step, with two syncs.
    """
    ema: Annotated[float, Gt(0), Lt(1)] | Literal["off"] = "off"
    """Decay of an exponential moving average of the parameters, which evaluation, export and sample
    then use; 0.999 averages over about 1,000 applied steps.
    """


@dataclass(frozen=True)
class EvalConfig(Section):
    every: Count | Literal["off"] = 100
    """Steps between evaluations; there is also one at the end."""
    batches: Count | Literal["auto", "all"] = "auto"
    """Micro-batches per rank and evaluation; auto: a tenth of the run's time, but at least 16."""


@dataclass(frozen=True)
class CheckpointConfig(Section):
    every: Annotated[int, Ge(1)] | Literal["off"] = 100
    """Steps between checkpoints; there is also one at the end, and one when a signal stops the run.
    """
    keep: Annotated[int, Ge(2)] = 2
    """How many of the newest checkpoints to keep, besides the best by validation loss or by the
    task's best_metric.
    """
    async_save: bool = True
    """Write in the background, from a copy of the state in host memory; false: training waits."""


@dataclass(frozen=True)
class MetricsConfig(Section):
    log_every: Annotated[int, Ge(1)] = 10
    """Steps between logged metrics. The host reads them one step later, while the device computes;
    other steps have no host-device sync.
    """
    peak_flops: Annotated[float, Ge(1e9)] | Literal["auto"] = "auto"
    """Dense peak of one device in FLOP/s, such as 989e12, in the dtype that is used, for
    throughput/mfu; auto: on GPUs, from the table in telemetry/mfu.py.
    """
    fingerprint: Count | Literal["off"] = "off"
    """Steps between hashes of each module's parameters and gradients in metrics.jsonl, from which
    `dist_amp diff` finds the module where two runs diverge. The first step has them too.
    """


@dataclass(frozen=True)
class DebugConfig(Section):
    detect_anomaly: bool = False
    """Stop at the operation whose backward returns nan, and print the stack of its forward; a step
    takes several times as long.
    """
    nonfinite: Literal["log", "step", "off"] = "log"
    """When to replay a skipped step to find the first module with an inf or nan. log: at log steps;
    step: right after the skipped step, at the cost of a host-device sync per step.
    """
    numerics: bool = False
    """At log steps, measure per parameter group the gradients that underflow in fp16 (costs two
    micro-batches) and the updates lost to rounding (costs a copy of the parameters).
    """
    profile: Count | Literal["off"] = "off"
    """How many steps torch.profiler records into a trace and a table, after a warm-up; on GPUs also
    a snapshot of allocations, written after these steps and if memory runs out.
    """
    audit_every: Count | Literal["off"] = "off"
    """In about one of so many steps each rank also computes another rank's micro-batch, and the run
    ends if a bit differs, which reveals silent data corruption. Needs parallel.bit_exact.
    """


@dataclass(frozen=True)
class Config(Section):
    """All settings of a run, by section."""

    run: RunConfig = field(default_factory=RunConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


# Settings that may differ after a resume: they change where and how fast a run computes, not what.
FREE_TO_CHANGE = (
    *("run.", "eval.", "checkpoint.", "metrics.", "debug.", "compile."),
    *("data.name", "data.path", "data.split", "data.validation_split"),
    *("data.tokenizer", "data.workers", "data.view", "data.streams"),
    *("data.on_bad_sample", "data.format"),  # the latter in configs of earlier versions
    *("parallel.strategy", "parallel.replicas", "parallel.accumulate_reduce"),
    *("parallel.activation_checkpointing", "parallel.cpu_offload", "parallel.bit_exact"),
    *("train.steps", "train.micro_batch_size", "train.accumulation_steps"),
    *("train.global_batch_size", "train.max_skips_in_a_row", "optim.fused", "optim.ema"),
    *("task.args.loss_chunk", "task.args.pad_to_multiple_of", "task.args.packed_attention"),
)
