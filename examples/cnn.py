"""A small convolutional network that classifies 32 x 32 images, with accuracy as a metric.

python -m dist_amp.train --task.target examples/cnn.py:CNN --train.micro_batch_size 64 \
    --train.steps 100 --train.clip_by off --optim.lr 0.001 --optim.betas 0.9 0.999 \
    --optim.weight_decay 0 --optim.schedule constant

This is Adam with a learning rate of 1e-3. On a machine without a GPU, add `--use_amp false`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class CNN:
    """Classify the direction of a noisy wave. Batch: images [B, 3, 32, 32] float32, classes [B]."""

    def __init__(self, samples: int = 6400):
        self.samples = samples

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 8 * 8, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        samples = self.samples if split == "train" else 640
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        classes = torch.randint(10, (samples,), generator=generator)
        angle = (2 * math.pi / 10 * classes).reshape(-1, 1, 1, 1)
        axis = torch.linspace(-1, 1, 32)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        wave = torch.sin(4 * (x * angle.cos() + y * angle.sin()) + 1)
        noise = torch.randn(samples, 3, 32, 32, generator=generator)
        return TensorDataset(wave + 2 * noise, classes)

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, classes = batch
        return F.cross_entropy(model(images).float(), classes, reduction="sum")

    def weight(self, batch: list[Tensor]) -> float:
        return len(batch[1])

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        images, classes = batch
        # A sum, like the loss: the run divides both by the total weight.
        return {"accuracy": (model(images).argmax(dim=1) == classes).sum()}
