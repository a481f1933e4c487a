"""The experiments of the AMP report: settings of the main job, tasks, and what is expected of an H200.

Each one is a command line of `python -m dist_amp.train`; `smaller` is added to it for --reduced, on a CPU.
"""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dist_amp.bench.loops import UNDISTURBED
from dist_amp.config.load import load_config
from dist_amp.settings import Config

TRAIN, INFERENCE = MODES = ("train", "inference")


class Target(NamedTuple):
    """What is expected of one H200, at least: the speed over `over`, and the share of float32's memory saved."""

    mode: str
    precision: str
    speed: float
    saving: float = 0.0
    over: str = "fp32"


@dataclass(frozen=True)
class Experiment:
    name: str
    about: str
    arguments: str  # of the main job
    smaller: str = ""
    batches: Sequence[int] = ()  # other micro-batch sizes to train with
    smaller_batches: Sequence[int] = ()
    precisions: Sequence[str] = ()  # in addition to those of every experiment
    targets: Sequence[Target] = ()
    environ: Mapping[str, str] = field(default_factory=dict)  # overridden by the arguments, as in the main job

    def config(self, *more: str) -> Config:
        """The settings with `more` added, in one process. Errors: ConfigError."""
        words = [*shlex.split(self.arguments), *more, "--parallel.strategy", "single", *UNDISTURBED]
        return load_config(words, self.environ)

    def reduced(self) -> "Experiment":
        """The form for a CPU, without the targets of the full one."""
        arguments = f"{self.arguments} {self.smaller}".rstrip()
        return replace(self, arguments=arguments, batches=self.smaller_batches, targets=())


def own_experiment(words: Sequence[str]) -> Experiment:
    """The experiment of a user's task and settings. Errors: ConfigError."""
    config = load_config(words)
    name, about = config.task.target.rpartition(":")[2], f"`{config.task.target}`, with its own settings."
    return Experiment(name, about, shlex.join(words), environ=os.environ)


class Linear:
    """Fit the mean of ten numbers. Batch: [x [B, 10], y [B, 1]] float32."""

    def build_model(self) -> nn.Module:
        return nn.Linear(10, 1)

    def build_dataset(self, split: str) -> TensorDataset:
        x = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.mean(dim=1, keepdim=True))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1], reduction="sum")

    def weight(self, batch: list[Tensor]) -> float:
        return batch[1].numel()


class MLP(Linear):
    """Fit y = |x|. Batch: [x [B, width], y [B, width]] float32."""

    def __init__(self, width: int = 4096, samples: int = 25_600):
        self.width, self.samples = width, samples

    def build_model(self) -> nn.Module:
        hidden = (nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(2))
        return nn.Sequential(*hidden, nn.Linear(self.width, self.width))

    def build_dataset(self, split: str) -> TensorDataset:
        x = torch.randn(self.samples, self.width, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.abs())


class CNN(Linear):
    """Classify the direction of a noisy wave. Batch: [images [B, 3, 32, 32] float32, classes [B] int64]."""

    def __init__(self, samples: int = 6400):
        self.samples = samples

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(64 * 8 * 8, 10)),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        classes = torch.randint(10, (self.samples,), generator=generator)
        angle = (2 * math.pi / 10 * classes)[:, None, None, None]
        y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
        wave = torch.sin(4 * (x * angle.cos() + y * angle.sin()) + 1)
        return TensorDataset(wave + 0.5 * torch.randn(self.samples, 3, 32, 32, generator=generator), classes)

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


# --- the experiments

HERE = "--task.target dist_amp.bench.amp.experiments:"
# The tutorials' optimizers with their defaults: no weight decay, no schedule, no clipping.
PLAIN = " --train.clip_by off --optim.weight_decay 0 --optim.schedule constant"
SGD = f"{PLAIN} --optim.name sgd --optim.lr 0.1 --optim.momentum 0"
ADAM = f"{PLAIN} --optim.name adamw --optim.lr 0.001 --optim.betas 0.9 0.999"
ALL = (
    Experiment(
        "linear",
        "Linear regression, 10 numbers to 1, on 20 points: the smallest model. Launching operations takes longest.",
        f"{HERE}Linear --train.steps 15 --train.micro_batch_size 4{SGD}",
    ),
    Experiment(
        "mlp",
        "Three linear layers of 4096, batches of 512: nearly all of the time is matrix products. y = |x|, SGD. "
        "Autocast and loss scaler on and off. Other batch sizes: 513 is not a multiple of 8, which tensor cores need.",
        f"{HERE}MLP --train.steps 150 --train.micro_batch_size 512{SGD}",
        "--task.args.width 128 --task.args.samples 640 --train.micro_batch_size 32 --train.steps 40",
        batches=(128, 256, 513),
        smaller_batches=(16, 33),
        precisions=("fp32_scaled",),
        # The scaler should cost less than 10 % of autocast alone.
        targets=(Target(TRAIN, "bf16", 2.3), Target(TRAIN, "fp16", 1 / 1.1, over="fp16_unscaled")),
    ),
    Experiment(
        "sinusoid",
        "1 x 1 convolutions that draw a two-dimensional sinusoid of 512 x 512 in each step. Adam. Two hidden layers of "
        "256: activations of 268 MB each in float32, so memory traffic matters as much as arithmetic.",
        "--task.target dist_amp.tasks.sinusoid:Sinusoid --task.args.size 512 --task.args.crop 512 --task.args.crops 1 "
        f"--train.steps 512 --train.micro_batch_size 1{ADAM}",
        "--task.args.size 32 --task.args.crop 32 --task.args.width 64 --task.args.frequencies 1 0.5 --train.steps 200 "
        "--optim.lr 0.004",
        targets=(Target(TRAIN, "fp16", 1.87, 0.49), Target(INFERENCE, "fp16", 1.48)),
    ),
    Experiment(
        "cnn",
        "Two convolutions and a classifier on 3 x 32 x 32, batches of 64: small operations. The class is the direction "
        "of a wave; Adam. Again with batches of 4096, which give a GPU enough work.",
        f"{HERE}CNN --train.steps 100 --train.micro_batch_size 64{ADAM}",
        "--task.args.samples 320 --train.micro_batch_size 8 --train.steps 30",
        batches=(4096,),
        smaller_batches=(16,),
    ),
    Experiment(
        "gpt",
        "A GPT of 124 M parameters on bytes of Python source, context 1024, batches of 8, AdamW: a typical use of AMP.",
        "--task.target dist_amp.tasks.causal_lm:CausalLM --task.args.context 1024 --task.args.width 768 "
        "--task.args.layers 12 --task.args.heads 12 --task.args.vocabulary 50304 --train.steps 50 "
        "--train.micro_batch_size 8 --optim.lr 0.0006 --optim.warmup_steps 10 --optim.schedule constant",
        "--task.args.context 32 --task.args.width 32 --task.args.layers 2 --task.args.heads 2 "
        "--task.args.vocabulary 256 --train.micro_batch_size 4 --train.steps 30 --optim.lr 0.004",
    ),
)
EXPERIMENTS = {one.name: one for one in ALL}
