"""Two convolutions and a classifier on 3 x 32 x 32, batches of 64: small operations, more of launching than computing.

100 batches, cross-entropy over 10 classes, Adam at 1e-3; the class is which tenth of the circle a wave's direction lies
in. Once more with batches of 4096, where a GPU has work to do.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dist_amp.bench.amp.experiment import ADAM, TRAIN, Experiment, Published, words_of

CLASSES = 10


class CNN:
    """Tell the direction of a wave. Batch: [images [B, 3, 32, 32] float32, classes [B] int64]."""

    def __init__(self, samples: int = 6400):
        self.samples = samples

    def build_model(self) -> nn.Module:
        stages = ((3, 32), (32, 64))
        convolutions = (
            nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for given, made in stages
        )
        return nn.Sequential(*convolutions, nn.Sequential(nn.Flatten(), nn.Linear(64 * 8 * 8, CLASSES)))

    def build_dataset(self, split: str) -> TensorDataset:
        return waves(self.samples)

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")

    def weight(self, batch: list[Tensor]) -> float:
        return len(batch[1])


def waves(samples: int) -> TensorDataset:
    """Sines across the picture, in a direction of their own each, with noise."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(CLASSES, (samples,), generator=generator)
    angle = (2 * math.pi / CLASSES * classes)[:, None, None, None]
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    wave = torch.sin(4 * (x * angle.cos() + y * angle.sin()) + 1)
    return TensorDataset(wave + 0.5 * torch.randn(samples, 3, 32, 32, generator=generator), classes)


SETTINGS = {
    "task.target": "dist_amp.bench.amp.experiments.cnn:CNN",
    "train.steps": 100,
    "train.micro_batch_size": 64,
    **ADAM,
}
FULL = Experiment(
    "cnn",
    __doc__,
    words_of(SETTINGS),
    batches=(4096,),
    # Called illustrative where they stand.
    published=(Published(TRAIN, "fp32", 15.8, 2150), Published(TRAIN, "fp16", 7.5, 1350)),
)
SMALLER = {"task.args.samples": 320, "train.micro_batch_size": 8, "train.steps": 30}
REDUCED = FULL.reduced(SETTINGS | SMALLER, batches=(16,))
