"""Linear regression from 10 numbers to 1 on 20 samples: the smallest task that trains.

python -m dist_amp.train --task.target examples/linear.py:Linear --train.micro_batch_size 4 \
    --train.steps 15 --train.clip_by off --optim.name sgd --optim.lr 0.1 --optim.momentum 0 \
    --optim.weight_decay 0 --optim.schedule constant

On one process this is plain SGD for 3 epochs. On a machine without a GPU, add `--use_amp false`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Linear:
    """Fit the mean of ten numbers. Batch: x [B, 10], y [B, 1], both float32."""

    def build_model(self) -> nn.Module:
        return nn.Linear(10, 1)

    def build_dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        x = torch.randn(20, 10, generator=generator)
        return TensorDataset(x, x.mean(dim=1, keepdim=True))

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), y, reduction="sum")

    def weight(self, batch: list[Tensor]) -> float:
        return batch[1].numel()
