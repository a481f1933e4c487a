"""Everything that can be set: one dataclass per section; each key with its type, range, default and meaning."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dist_amp.config.range import Range

Count = Annotated[int, Range(low=1)]
PositiveFloat = Annotated[float, Range(above=0)]
Beta = Annotated[float, Range(low=0, below=1)]
Checkpointing = Annotated[int, Range(low=1)] | Literal["none", "full", "selective"]
Strategy = Literal["single", "ddp", "fsdp", "hsdp"]


@dataclass(frozen=True)
class RunConfig:
    dir: str = "auto"
    """The run's folder; auto: runs/<UTC time>-<id>, the same on all ranks and in all restarts by one torchrun. Name it
    yourself to go on later, or where machines may be replaced."""
    seed: Annotated[int, Range(low=0, high=2**63 - 1)] = 0
    """Seeds initialisation, data order and dropout; each rank's dropout differs."""
    deterministic: bool = False
    """Only deterministic kernels; slower, and bit-identical from run to run."""
    resume: str = "auto"
    """auto: from the newest valid checkpoint in run.dir, if any; never; or the path of a checkpoint or a run."""
    allow_config_change: bool = False
    """Resume even if the data, or settings that change the mathematics, differ from the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA (or ROCm) if there is a GPU, else the CPU."""
    timeout_seconds: Annotated[float, Range(above=0)] = 300.0
    """How long a collective may wait for the other ranks before the job ends with an error."""


@dataclass(frozen=True)
class TaskConfig:
    target: str = "dist_amp.tasks.causal_lm:CausalLM"
    """The task's class, as module:Class or path/to/file.py:Class."""
    args: Any = field(default_factory=dict)
    """The task's constructor arguments."""


@dataclass(frozen=True)
class SourceConfig:
    name: str = "auto"
    """A dataset on the Hugging Face hub, as user/name or user/name:configuration; auto: what the task ships with."""
    revision: str = "main"
    """The branch, tag or commit of the dataset on the hub."""
    path: str = "off"
    """In place of a name: a file, folder or glob, local or at an address that fsspec knows, as s3://bucket/*.parquet."""
    format: Literal["auto", "text", "json", "csv", "parquet", "images", "saved", "tokens"] = "auto"
    """How `path` is read. saved: a folder written by save_to_disk; tokens: by dist_amp.tokenize; auto: as it looks."""
    split: str = "train"
    """The split to train on."""
    validation_split: str = "auto"
    """The split to evaluate on; auto: "validation" or "test" if there is one, else a part held out of `split`."""
    validation_fraction: Annotated[float, Range(above=0, below=1)] = 0.05
    """The part held out if there is no split to evaluate on."""
    text_column: str = "text"
    """The column that holds the text."""


@dataclass(frozen=True)
class MixedSourceConfig(SourceConfig):
    weight: PositiveFloat = 1.0
    """This source's share of the mixture is its weight over the sum of all weights."""


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    sources: Any = field(default_factory=dict)
    """A mixture: a table data.sources.NAME per source, with the keys above and weight, in place of a name or path."""
    mix_by: Literal["documents", "rows"] = "rows"
    """What a mixture's weights count: documents, packed together; or packed rows, each of a single source."""
    view: Literal["auto", "parquet", "map"] = "auto"
    """parquet: read the files by row group; map: convert them once; auto: parquet if they exceed map_up_to_gib."""
    map_up_to_gib: Annotated[float, Range(low=0)] = 4.0
    """The size of Parquet files above which view=auto reads them by row group."""
    streams: Count = 64
    """view=parquet: streams that are dealt to the ranks, each with row groups of its own; a multiple of the ranks."""
    shuffle_groups: Count = 2
    """view=parquet: row groups of a stream whose rows are mixed; more: nearer to a full shuffle, and more memory."""
    tokenizer: str = "auto"
    """A tokenizer's file or folder, a model on the hub, or bytes; auto: the task's own."""
    pack: Literal["auto", "off", "cut", "best_fit"] = "auto"
    """Rows of one length: cut from all documents joined, or best_fit of whole ones that do not see one another; off: a
    document each, padded; auto: the task's default."""
    long_documents: Literal["auto", "split", "truncate", "refuse"] = "auto"
    """Documents longer than a row; auto: split if packed, else truncate."""
    group_by_length: Count | Literal["off"] = "off"
    """Steps whose samples are sorted by length and dealt anew, so that a batch has less padding; off: plain order."""
    workers: Annotated[int, Range(low=0)] = 0
    """Loader processes per rank; 0: batches are made in the training process."""
    shuffle: bool = True
    """A new order every epoch; false: the dataset's own."""
    drop_last: bool = False
    """Leave out the last samples of an epoch that do not fill a step."""


@dataclass(frozen=True)
class ScalerConfig:
    init_scale: Annotated[float, Range(above=0)] = 65536.0
    """The loss is multiplied by this at the start, so that small gradients do not vanish in fp16."""
    growth_factor: Annotated[float, Range(above=1)] = 2.0
    """What the scale is multiplied by after growth_interval finite steps in a row."""
    backoff_factor: Annotated[float, Range(above=0, below=1)] = 0.5
    """What the scale is multiplied by after a step that was not finite."""
    growth_interval: Annotated[int, Range(low=1)] = 2000
    """Finite steps in a row before the scale grows."""
    min_scale: Annotated[float, Range(above=0)] = 1.0
    """End the run when the scale falls below this: gradients that stay infinite at any scale have another cause."""


@dataclass(frozen=True)
class PrecisionConfig:
    use_amp: bool = True
    """Mixed precision; false computes everything in float32."""
    dtype: Literal["bf16", "fp16"] = "bf16"
    """The dtype of mixed precision; fp16 uses the loss scaler."""
    cast_by: Literal["auto", "autocast", "policy"] = "auto"
    """Who casts: autocast (any strategy) or FSDP2's policy (fsdp, hsdp); auto: the policy if sharded,
    unless the model has batch norm."""
    tf32: bool = False
    """Let CUDA round float32 products to TF32 (10 bits of mantissa) on the tensor cores."""
    scaler: ScalerConfig = field(default_factory=ScalerConfig)
    """The fp16 loss scaler; no effect in bf16 and float32."""

    @property
    def name(self) -> str:
        return self.dtype if self.use_amp else "fp32"


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = "auto"
    """single: one process; ddp: a full copy per rank; fsdp: one copy sharded over all ranks; hsdp: sharded within
    each of `replicas` groups; auto: single for one process, else ddp if the training state fits in half of the
    device's memory, else fsdp."""
    replicas: Annotated[int, Range(low=1)] | Literal["auto"] = "auto"
    """hsdp: how many copies there are, each sharded over world_size / replicas ranks; auto: one per machine, or two."""
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """fsdp, hsdp: dtype of stored parameters and moments; bf16 halves their memory and loses small updates."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fsdp, hsdp: dtype in which gradients are summed over ranks, and accumulated."""
    comm_dtype: Literal["off", "bf16", "fp16"] = "off"
    """ddp: compress gradients to this for the all-reduce."""
    accumulate_reduce: Literal["last", "every"] = "last"
    """fsdp, hsdp: reduce gradients after the last micro-batch only (holds 4 bytes per parameter unsharded on each
    rank), or after every one (holds 4 / world_size bytes, and sends up to twice as much: docs/collectives.md)."""
    activation_checkpointing: Checkpointing = "none"
    """Blocks that recompute activations in backward: none, full (all), selective (all, but not products and attention),
    or every n-th. full keeps the blocks' inputs, for about a third more computation; selective costs hardly any."""
    cpu_offload: bool = False
    """fsdp, hsdp on GPUs: keep parameters, gradients and moments in host memory; costs a host read per step."""


@dataclass(frozen=True)
class CompileConfig:
    blocks: bool = False
    """Compile each block with torch.compile, identical blocks once, and the task's loss; the first step and evaluation
    take seconds to minutes more. A model without blocks is compiled as one."""
    fullgraph: bool | Literal["auto"] = "auto"
    """true: refuse a block that is not one graph; auto: compile such a block in parts and report what breaks it;
    false: in parts, silently."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """inductor's mode: reduce-overhead replays CUDA graphs; max-autotune does too, and picks kernels by timing them,
    so a resumed run may differ in the last bits."""
    backend: str = "inductor"
    """The code generator; aot_eager and eager generate no code, which is quick for trying a model."""
    dynamic: bool = False
    """false: code for each input shape, at most 8, so a resumed run computes the same bits; true: one for all shapes,
    for batches padded to their own longest sample."""


@dataclass(frozen=True)
class TrainConfig:
    steps: Annotated[int, Range(low=1, high=10_000_000)] = 100
    """Optimizer steps, applied or skipped."""
    micro_batch_size: Count = 8
    """Samples in one forward and backward of one rank."""
    accumulation_steps: Count | Literal["auto"] = "auto"
    """Micro-batches in a step; auto: as global_batch_size asks for, else 1."""
    global_batch_size: Count | Literal["auto"] = "auto"
    """Samples in a step over all ranks: micro_batch_size x ranks x accumulation_steps; auto: that product."""
    clip_by: Literal["norm", "value", "off"] = "norm"
    """Limit the norm of all gradients together, or each of their elements, or nothing."""
    max_grad_norm: Annotated[float, Range(above=0)] = 1.0
    """The limit of clip_by=norm."""
    max_grad_value: Annotated[float, Range(above=0)] = 1.0
    """The limit of clip_by=value."""
    max_skips_in_a_row: Count = 50
    """End the run after this many skipped steps in a row; checked every metrics.log_every steps."""
    gc_every: Count | Literal["off"] = 50
    """Steps between Python's garbage collections, on all ranks at once; off: at any time, and all ranks wait for each
    rank's."""

    @property
    def clip_limit(self) -> float:
        return self.max_grad_value if self.clip_by == "value" else self.max_grad_norm


@dataclass(frozen=True)
class OptimConfig:
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    """adamw: Loshchilov & Hutter 2019, arXiv:1711.05101; sgd with momentum; muon: hidden matrices by Muon, the rest by
    AdamW (optimizers/muon.py). A task's optimizer(groups, lr) takes its place."""
    lr: PositiveFloat = 3e-4
    """The peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How lr decays after the warm-up, until the last step; wsd: constant, then linear (Hu et al. 2024,
    arXiv:2404.06395). A task's schedule(step) takes its place."""
    decay_ratio: Annotated[float, Range(above=0, high=1)] = 0.2
    """wsd: the share of train.steps at their end in which lr decays. Source: Hägele et al. 2024, arXiv:2405.18392."""
    warmup_steps: Annotated[int, Range(low=0)] = 0
    """Applied steps over which lr rises linearly from zero."""
    min_lr_ratio: Annotated[float, Range(low=0, high=1)] = 0.1
    """The schedule ends at this share of lr."""
    weight_decay: Annotated[float, Range(low=0)] = 0.1
    """Decoupled decay of matrices; vectors (biases, norms) get none. For sgd: added to the gradient."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's term for numerical stability."""
    momentum: Beta = 0.9
    """Momentum of sgd, and of muon, which is usually 0.95."""
    fused: bool = True
    """One kernel that unscales, clips, steps or skips; false: unscale_, clip_grad_norm_, step and update one by one,
    with two host reads per step."""
    ema: Annotated[float, Range(above=0, below=1)] | Literal["off"] = "off"
    """Decay of a moving average of the parameters, which evaluation, export and sample then use: 0.999 averages about
    1,000 applied steps. off: none."""


@dataclass(frozen=True)
class EvalConfig:
    every: Count | Literal["off"] = 100
    """Steps between evaluations; there is also one at the end. off: none."""
    batches: Count | Literal["all"] = "all"
    """How many micro-batches of each rank an evaluation takes."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: Annotated[int, Range(low=1)] | Literal["off"] = 100
    """Steps between checkpoints; there is also one at the end, and one when a signal stops the run. off: none."""
    keep: Annotated[int, Range(low=2)] = 2
    """How many of the newest checkpoints are kept, besides the one with the lowest held-out loss."""
    async_save: bool = True
    """Write in the background, from a copy of the state in host memory; false: training waits."""
    on_failure: Literal["go_on", "stop"] = "go_on"
    """When a checkpoint can't be written: warn and try again at the next one, or end the run."""


@dataclass(frozen=True)
class MetricsConfig:
    log_every: Annotated[int, Range(low=1)] = 10
    """Steps between logged metrics. Only they read the device, one step later, while it works on the next."""
    peak_flops: Annotated[float, Range(low=1e9)] | Literal["auto"] = "auto"
    """Dense peak of one device in FLOP/s, such as 989e12, in the dtype that is used: the 1 of throughput/mfu. auto: on
    GPUs, from the table in telemetry/mfu.py."""


@dataclass(frozen=True)
class DebugConfig:
    check_every: Count | Literal["off"] = 100
    """Steps between checks that all ranks hold the same model and read different data: diagnostics/consistency.py."""
    detect_anomaly: bool = False
    """Stop at the operation whose backward gives a nan, with its forward's stack; several times slower."""
    nonfinite: Literal["log", "step", "off"] = "log"
    """When to replay a skipped step and name its first module with an inf or nan. log: at log steps; step: right after
    it, with the parameters unchanged, for a host read per step; off."""
    numerics: bool = False
    """At log steps, measure per parameter group the gradients that become zero in fp16 (two more micro-batches) and the
    updates lost to rounding (a copy of the parameters)."""
    profile: Count | Literal["off"] = "off"
    """How many steps torch.profiler records after the warm-up: a trace and a table; diagnostics/profiling.py."""
    memory_snapshot: bool = False
    """On GPUs, record allocations, and write them after the profiled steps and when memory runs out."""
    ranks: tuple[Annotated[int, Range(low=0)], ...] | Literal["all"] = "all"
    """The ranks that profile and write memory snapshots, such as 0 3; or all."""


@dataclass(frozen=True)
class Config:
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
