"""Three linear layers, 4096 wide, batches of 512: nearly all of the time is three matrix products and their gradients.

50 batches x 3 epochs, mean squared error, SGD with a learning rate of 0.1; y = |x|, so that there is something to learn
in 150 steps. Autocast on and off x loss scaler on and off, and other batch sizes: 513 is no multiple of 8, which the
tensor cores ask for.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dist_amp.bench.amp.experiment import SGD, TRAIN, Experiment, Published, Target, words_of
from dist_amp.bench.amp.experiments.linear import Linear


class MLP(Linear):
    """Fit y = |x|. Batch: [x [B, width], y [B, width]] float32."""

    def __init__(self, width: int = 4096, samples: int = 25_600):
        self.width = width
        self.samples = samples

    def build_model(self) -> nn.Module:
        hidden = (nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(2))
        return nn.Sequential(*hidden, nn.Linear(self.width, self.width))

    def build_dataset(self, split: str) -> TensorDataset:
        x = torch.randn(self.samples, self.width, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.abs())


SETTINGS = {
    "task.target": "dist_amp.bench.amp.experiments.mlp:MLP",
    "train.steps": 150,
    "train.micro_batch_size": 512,
    **SGD,
}
FULL = Experiment(
    "mlp",
    __doc__,
    words_of(SETTINGS),
    batches=(128, 256, 513),
    precisions=("fp32_scaled",),
    published=(
        Published(TRAIN, "fp32", 5.621),
        Published(TRAIN, "fp16_unscaled", 2.462),
        Published(TRAIN, "fp16", 3.550),
    ),
    # The scaler is to cost under 10 % of autocast alone.
    targets=(Target(TRAIN, "bf16", 2.3), Target(TRAIN, "fp16", 1 / 1.1, over="fp16_unscaled")),
)
SMALLER = {"task.args.width": 128, "task.args.samples": 640, "train.micro_batch_size": 32, "train.steps": 40}
REDUCED = FULL.reduced(SETTINGS | SMALLER, batches=(16, 33))
