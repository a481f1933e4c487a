"""Linear regression, 10 numbers to 1, of 20 points: the smallest thing that works, and a smoke test of the rest.

One weight matrix of 10 numbers, SGD with a learning rate of 0.1, 3 epochs of 5 steps. Nothing here is large enough for
its precision to matter: what a step costs is launching its operations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dist_amp.bench.amp.experiment import SGD, Experiment, words_of


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


SETTINGS = {
    "task.target": "dist_amp.bench.amp.experiments.linear:Linear",
    "train.steps": 15,
    "train.micro_batch_size": 4,
    **SGD,
}
FULL = Experiment("linear", __doc__, words_of(SETTINGS))
REDUCED = FULL
