"""A network that learns an image, a quantized 2-D sinusoid, from pixel coordinates.

python -m dist_amp.train --task.target examples/sinusoid.py:Sinusoid --task.args.size 128 \
    --task.args.crop 16 --train.steps 1500 --train.micro_batch_size 16 --optim.lr 0.003 \
    --optim.weight_decay 0 --eval.every 500

TensorBoard shows the target and the model's output side by side. A constant output, the mean, has
a loss of 0.079. On a machine without a GPU, add `--use_amp false`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]


class PixelNorm(nn.Module):
    """Layer normalization over the channels of each pixel: [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Sinusoid:
    """Fit crops of an image. Batch: coordinates [B, 2, crop, crop], values [B, 1, crop, crop]."""

    def __init__(
        self,
        size: int = 512,
        crop: int = 64,
        crops: int = 1024,
        levels: int = 4,
        frequencies: tuple[float, float] = (4.0, 2.0),
        width: int = 256,
        hidden_layers: int = 2,
    ):
        if size % crop:  # a ValueError ends the run with its message, before ranks are started
            raise ValueError(f"size={size} must be a multiple of crop={crop}: crops tile it")
        self.size, self.crop, self.crops = size, crop, crops
        self.levels, self.frequencies = levels, frequencies
        self.width, self.hidden_layers = width, hidden_layers
        axis = torch.linspace(-1, 1, size)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        across, down = frequencies
        wave = torch.sin(math.pi * across * x) * torch.sin(math.pi * down * y)
        quantized = ((wave + 1) / 2 * (levels - 1)).round() / (levels - 1)
        self.image = {"coordinates": torch.stack((x, y)), "values": quantized[None]}

    def build_model(self) -> nn.Module:
        """1 x 1 convolutions: an MLP on each pixel, whose FLOPs are nearly all matrix products."""
        layers = [
            nn.Sequential(nn.Conv2d(channels, self.width, 1), PixelNorm(self.width), nn.ReLU())
            for channels in [2] + self.hidden_layers * [self.width]
        ]
        return nn.Sequential(*layers, nn.Conv2d(self.width, 1, 1))

    def build_dataset(self, split: str) -> list[Batch]:
        """Random crops for training; for validation, the crops that tile the image."""
        if split == "train":
            rng = torch.Generator().manual_seed(0)
            corners = torch.randint(self.size - self.crop + 1, (self.crops, 2), generator=rng)
        else:
            starts = torch.arange(0, self.size, self.crop)
            corners = torch.cartesian_prod(starts, starts)
        return [
            {
                name: values[:, top : top + self.crop, left : left + self.crop]
                for name, values in self.image.items()
            }
            for top, left in corners.tolist()
        ]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["coordinates"]).float(), batch["values"], reduction="sum")

    def weight(self, batch: Batch) -> float:
        return batch["values"].numel()

    def sample(self, model: nn.Module) -> Tensor:
        """The target and the model's output, side by side: [1, H, 2 W] in 0..1."""
        device = next(model.parameters()).device
        strips = self.image["coordinates"].split(64, dim=1)  # one at a time, to save memory
        outputs = [model(strip[None].to(device))[0].float().cpu() for strip in strips]
        return torch.cat((self.image["values"], torch.cat(outputs, dim=1).clamp(0, 1)), dim=2)
