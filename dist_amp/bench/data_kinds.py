"""The kinds of sources that bench data reads: their files, made up here, and their datasets."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from torch.utils.data import default_collate

from dist_amp.settings import DataConfig
from dist_amp.sources.labelled_images import LabelledImages
from dist_amp.sources.load import load_split
from dist_amp.sources.packing import Packing
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents

FILES = 2  # of each kind, so that each of two workers can stream its own
GROUPS = 16  # row groups of a Parquet file
ROW_TOKENS = 512


class Kind(NamedTuple):
    """A kind of source; each function gets the folder of all kinds' files."""

    dataset: Callable[[Path], Any]
    collate: Callable[[list[Any]], Any]
    loader: str = ""  # by which the `datasets` library reads the files
    files: str = ""


def arrow(folder: Path) -> Any:
    import datasets

    return datasets.load_from_disk(str(folder / "arrow"))


def rows(name: str, view: Literal["map", "parquet"], folder: Path) -> Any:
    return load_split(DataConfig(path=str(folder / name), view=view, streams=FILES * GROUPS // 4), "train", "label")


def tokens(folder: Path) -> Any:
    return token_documents(DataConfig(path=str(folder / "json")), "train", open_tokenizer("bytes"))


def packing() -> Any:
    return Packing.of(DataConfig(pack="best_fit"), ROW_TOKENS, auto="off")


def packed(folder: Path) -> Any:
    return packing().rows(tokens(folder), "train")


def collate_packed(samples: list[Any]) -> Any:
    return packing().collate(samples)


def images(folder: Path) -> Any:
    return LabelledImages(rows("images", "map", folder), "image", "label", (32, 32), channels=3, classes=10)


PAD = Packing(ROW_TOKENS, "off", "truncate").collate
KINDS = {
    "arrow": Kind(arrow, default_collate, "arrow", "arrow/*.arrow"),
    "json": Kind(partial(rows, "json", "map"), default_collate, "json", "json/train-*"),
    "parquet": Kind(partial(rows, "parquet", "parquet"), default_collate, "parquet", "parquet/train-*"),
    "tokens": Kind(tokens, PAD, "parquet", "tokens/train-*"),
    "packed": Kind(packed, collate_packed),
    "images": Kind(images, default_collate, "parquet", "images/train-*"),
}


def write_files(folder: Path, count: int) -> None:
    """Texts of 64 to 960 bytes in four forms, a token per byte in one, and PNG images of 32 x 32 pixels."""
    import datasets

    random = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    texts = [random.choice(letters, size).tobytes() for size in random.integers(64, 960, count)]
    ids = [np.frombuffer(text, np.uint8) for text in texts]
    pictures = [{"bytes": png(random), "path": None} for _ in range(min(count, 1000))]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    labels = [number % 10 for number in range(len(pictures))]
    text = datasets.Dataset.from_dict({"text": [text.decode() for text in texts]})
    text.save_to_disk(folder / "arrow", num_shards=FILES)
    write_parts(text, folder / "json", "json")
    write_parts(text, folder / "parquet", "parquet")
    write_parts(datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}), folder / "tokens", "parquet")
    write_parts(
        datasets.Dataset.from_dict({"image": pictures, "label": labels}, features), folder / "images", "parquet"
    )


def write_parts(whole: Any, folder: Path, form: Literal["json", "parquet"]) -> None:
    """train-0, train-1 ..., and validation with the first row: so none of the others is held out."""
    folder.mkdir()
    parts = {f"train-{number}": whole.shard(FILES, number) for number in range(FILES)}
    for name, part in {**parts, "validation": whole.select([0])}.items():
        if form == "json":
            part.to_json(folder / f"{name}.jsonl")
        else:
            part.to_parquet(folder / f"{name}.parquet", batch_size=max(1, len(part) // GROUPS))


def png(random: np.random.Generator) -> bytes:
    out = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


class Counted:
    """A task whose batches are (samples, tokens, batch)."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def collate(self, samples: Sequence[Any]) -> tuple[int, int, Any]:
        count = sum(len(sample["input_ids"]) for sample in samples) if "input_ids" in samples[0] else 0
        return len(samples), count, self._collate(list(samples))
