"""Labelled images as tensors, from the data in `[data]` or from scikit-learn's digits."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_split


def labelled_rows(data: DataConfig, split: str, image_column: str, label_column: str) -> Any:
    """A split's rows with these columns, or None: see `load_rows`. Raises DataError if missing."""
    if data.name == "auto" and data.path == "off":
        return digits(split, image_column, label_column)
    rows = load_split(data, split, image_column, label_column)
    if rows is None:
        return None
    for name, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise DataError(f"task.args.{name}={column} does not exist; the columns are {columns}")
    return rows.select_columns([image_column, label_column])


@dataclass(frozen=True)
class LabelledImage:
    """A row as {"image": [channels, H, W] float32 in 0..1, "label": int64}."""

    columns: tuple[str, str]
    size: tuple[int, int]
    channels: int
    classes: int
    number_of: Mapping[str, int]  # class name -> number, for labels that are text

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Tensor]:
        value, label = (row[column] for column in self.columns)
        number = self.number_of.get(label) if isinstance(label, str) else label
        if not isinstance(number, int) or not 0 <= number < self.classes:
            raise ValueError(
                f"label {label!r} is not one of the {self.classes} classes, 0 to {self.classes - 1}"
            )
        height, width = self.size
        mode = "L" if self.channels == 1 else "RGB"
        image = opened(value).convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        levels = torch.from_numpy(numpy.array(image, numpy.float32)).view(height, width, -1)
        return {"image": levels.permute(2, 0, 1) / 255, "label": torch.tensor(int(number))}


def opened(value: Any) -> Image.Image:
    """The value of an image column as an image, decoded if it is bytes. Raises ValueError."""
    path = ""
    if isinstance(value, Mapping):  # as Parquet stores images
        path = value.get("path") or ""
        value = value.get("bytes")
    if isinstance(value, bytes):
        try:
            value = Image.open(io.BytesIO(value))
            value.load()
        except OSError as error:
            raise ValueError(f"the image {path} can't be decoded: {error}") from error
        value = ImageOps.exif_transpose(value)
    if value.mode.startswith(("I", "F")):
        mode = f"the image has pixels of mode {value.mode}"
        raise ValueError(f"{mode}, whose range is not known; convert it to 8 bits")
    return value


def digits(split: str, image_column: str, label_column: str) -> list[dict[str, Any]]:
    """Rows of scikit-learn's 1,797 digits (Alpaydin & Kaynak 1998, UCI 80); a tenth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.name=auto is scikit-learn's digits, and {error.name} is missing; pip install "
            "scikit-learn, or set data.name or data.path"
        ) from None
    scans = load_digits()
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(len(scans.target), generator=rng, device="cpu").tolist()
    held_out = len(order) // 10
    chosen = order[held_out:] if split == "train" else order[:held_out]
    levels = (scans.images * (255 / 16)).round().astype(numpy.uint8)  # [1797, 8, 8], from 0..16
    return [
        {image_column: Image.fromarray(levels[i]), label_column: int(scans.target[i])}
        for i in chosen
    ]
