"""A pixel-wise network that draws a quantised two-dimensional sinusoid from coordinates.

Nearly all of its FLOPs are matrix products of one width, so it shows the gain of mixed precision;
it has no batch statistics, so any number of ranks computes the same step.

Docs: docs/recipes.md
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_amp.settings import Count, Range

Batch = dict[str, Tensor]


class PixelNorm(nn.Module):
    """Layer normalisation over the channels of each pixel: [B, C, H, W] -> [B, C, H, W]."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class PixelNet(nn.Sequential):
    """coordinates [B, 2, H, W] in -1..1 -> level [B, 1, H, W] by 1 x 1 convolutions."""

    def __init__(self, width: int, hidden_layers: int):
        inputs = [2] + hidden_layers * [width]
        layers = [
            nn.Sequential(nn.Conv2d(channels, width, 1), PixelNorm(width), nn.ReLU())
            for channels in inputs
        ]
        super().__init__(*layers, nn.Conv2d(width, 1, 1))


@dataclass(eq=False)
class Sinusoid:
    """Fit crops of a picture. Batch: coordinates [B, 2, crop, crop], levels [B, 1, crop, crop]."""

    size: Annotated[int, Range(low=2)] = 512
    crop: Count = 64
    crops: Count = 1024
    levels: Annotated[int, Range(low=2)] = 4
    frequencies: tuple[float, float] = (4.0, 2.0)
    width: Count = 256
    hidden_layers: Count = 2

    def __post_init__(self) -> None:
        if self.size % self.crop:
            raise ValueError(
                f"size={self.size} must be a multiple of crop={self.crop}: crops tile the picture"
            )
        self.picture = draw(self.size, self.levels, self.frequencies)

    def build_model(self) -> nn.Module:
        return PixelNet(self.width, self.hidden_layers)

    def build_dataset(self, split: str) -> list[Batch]:
        """Random crops for training; for validation, the crops that tile the picture."""
        if split == "train":
            rng = torch.Generator().manual_seed(0)
            corners = torch.randint(self.size - self.crop + 1, (self.crops, 2), generator=rng)
        else:
            starts = torch.arange(0, self.size, self.crop)
            corners = torch.cartesian_prod(starts, starts)
        return [self.cut(top, left) for top, left in corners.tolist()]

    def cut(self, top: int, left: int) -> Batch:
        """The crop of the picture with this corner; it shares the picture's memory."""
        rows = slice(top, top + self.crop)
        columns = slice(left, left + self.crop)
        return {name: values[:, rows, columns] for name, values in self.picture.items()}

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["coordinates"]).float(), batch["levels"], reduction="sum")

    def weight(self, batch: Batch) -> float:
        return batch["levels"].numel()

    def flops_per_item(self, model: nn.Module) -> float:
        """FLOPs of one crop: 3 x 2 per multiply-add, without the coordinates' gradient."""
        weights = 2 * self.width + self.hidden_layers * self.width**2 + self.width
        return 2 * self.crop**2 * (3 * weights - 2 * self.width)

    def sample(self, model: nn.Module) -> Tensor:
        """The target and the model's drawing, side by side: [1, H, 2 W] in 0..1."""
        device = next(model.parameters()).device
        strips = self.picture["coordinates"].split(64, dim=1)  # one at a time, to save memory
        drawn = [model(strip[None].to(device))[0].float().cpu() for strip in strips]
        drawing = torch.cat(drawn, dim=1).clamp(0, 1)
        return torch.cat((self.picture["levels"], drawing), dim=2)


def draw(size: int, levels: int, frequencies: tuple[float, float]) -> Batch:
    """The picture: coordinates [2, size, size] in -1..1, levels [1, size, size] in 0..1."""
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    across, down = frequencies
    wave = torch.sin(math.pi * across * x) * torch.sin(math.pi * down * y)
    quantised = ((wave + 1) / 2 * (levels - 1)).round() / (levels - 1)
    return {"coordinates": torch.stack((x, y)), "levels": quantised[None]}
