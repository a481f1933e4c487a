"""A small convolutional network classifies images, by default scikit-learn's digits (8 x 8 pixels).

To train this model on your images, set `[data]`. To train a model of your own, copy this file.

Docs: docs/data.md
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from dist_amp.errors import DataError
from dist_amp.settings import Count, DataConfig
from dist_amp.sources.labelled_images import LabelledImage, labelled_rows
from dist_amp.sources.load import Converted, class_names

Side = Annotated[int, Ge(4)]  # the two poolings halve it twice
Batch = dict[str, Tensor]


class CNN(nn.Sequential):
    """images [B, channels, H, W] -> logits [B, classes]."""

    def __init__(self, channels: int, size: tuple[int, int], width: int, classes: int):
        height_out, width_out = (side // 2 // 2 for side in size)
        super().__init__(
            convolution(channels, width),
            convolution(width, 2 * width),
            nn.Sequential(nn.Flatten(), nn.Linear(2 * width * height_out * width_out, classes)),
        )


def convolution(channels: int, width: int) -> nn.Sequential:
    """[B, channels, H, W] -> [B, width, H // 2, W // 2]."""
    convolved = nn.Conv2d(channels, width, 3, padding=1, bias=False)  # the norm has a bias
    return nn.Sequential(convolved, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))


@dataclass(eq=False)
class ImageClassification:
    """Classify images. Batch: image [B, channels, H, W] float32 in 0..1, label [B] int64."""

    data: DataConfig
    size: tuple[Side, Side] = (8, 8)
    channels: Literal[1, 3] = 1
    classes: Annotated[int, Ge(2)] | Literal["auto"] = "auto"
    image_column: str = "image"
    label_column: str = "label"
    width: Count = 32
    shift_pixels: Annotated[float, Ge(0)] = 1.0
    rotation_degrees: Annotated[float, Ge(0), Le(180)] = 10.0
    flip: bool = False
    channels_last: bool = True

    @cached_property
    def training_rows(self) -> Any:
        return labelled_rows(self.data, "train", self.image_column, self.label_column)

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the classes, by number; empty if labels are plain numbers."""
        return class_names(self.training_rows, self.label_column)

    @cached_property
    def class_count(self) -> int:
        """The number of classes. Raises DataError if neither settings nor data have it."""
        if self.classes != "auto":
            return self.classes
        if len(self.names) < 2:
            raise DataError(
                f"task.args.classes=auto, but the column {self.label_column} names "
                f"{len(self.names)} classes; set task.args.classes to the number of classes"
            )
        return len(self.names)

    def build_model(self) -> nn.Module:
        return CNN(self.channels, self.size, self.width, self.class_count)

    def build_dataset(self, split: str) -> Any:
        rows = self.training_rows
        if split != "train":
            rows = labelled_rows(self.data, split, self.image_column, self.label_column)
        if rows is None:
            return None
        columns = (self.image_column, self.label_column)
        number_of = {name: number for number, name in enumerate(self.names)}
        image_of = LabelledImage(columns, self.size, self.channels, self.class_count, number_of)
        return Converted(rows, image_of)

    def augment(self, sample: Batch, rng: torch.Generator) -> Batch:
        """Rotate, shift and flip at random, within the settings' limits; new pixels are black."""
        shares = 2 * torch.rand(4, generator=rng) - 1  # of the limits, in -1..1
        angle, right, down, mirror = shares.tolist()
        height, width = self.size
        turn = angle * math.radians(self.rotation_degrees)
        cos = math.cos(turn)
        sin = math.sin(turn)
        flip = -1 if self.flip and mirror < 0 else 1
        # Maps an output pixel to its source; x and y go from -1 to 1, however long the sides are.
        source = [
            [flip * cos, -sin * height / width, 2 * right * self.shift_pixels / width],
            [flip * sin * width / height, cos, 2 * down * self.shift_pixels / height],
        ]
        image = sample["image"][None]
        grid = F.affine_grid(torch.tensor([source]), list(image.shape), align_corners=False)
        return {**sample, "image": F.grid_sample(image, grid, align_corners=False)[0]}

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[B, classes] float32. FSDP2 needs contiguous weights: only images are channels_last."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return model(batch["image"].contiguous(memory_format=layout)).float()

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["label"], reduction="sum")

    def weight(self, batch: Batch) -> float:
        return len(batch["label"])

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        logits = self.logits(model, batch)
        loss = F.cross_entropy(logits, batch["label"], reduction="sum")
        return {"loss": loss, "accuracy": (logits.argmax(1) == batch["label"]).sum()}
