"""Three linear layers of width 4096, with ReLU: nearly all of the time goes to matrix products.

python -m dist_amp.train --task.target examples/mlp.py:MLP --train.micro_batch_size 512 \
    --train.steps 150 --train.clip_by off --optim.name sgd --optim.lr 0.1 --optim.momentum 0 \
    --optim.weight_decay 0 --optim.schedule constant

On one process this is 3 epochs of 50 batches. On a machine without a GPU, add `--use_amp false`,
and `--task.args.width 64` to make it quick.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class MLP:
    """Fit y = |x|. Batch: x [B, width], y [B, width], both float32.

    Each keyword argument of the constructor is a setting: `--task.args.width 64`.
    """

    def __init__(self, width: int = 4096, samples: int = 25_600):
        self.width = width
        self.samples = samples

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        is_train = split == "train"
        generator = torch.Generator().manual_seed(0 if is_train else 1)
        x = torch.randn(self.samples if is_train else 512, self.width, generator=generator)
        return TensorDataset(x, x.abs())

    def loss_sum(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x).float(), y, reduction="sum")

    def weight(self, batch: list[Tensor]) -> float:
        return batch[1].numel()  # every number counts, so the mean is over B x width
