"""Fine-tune a classifier of texts or images from a Hugging Face model, with a new head if needed.

Docs: docs/huggingface.md
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from dist_amp.errors import DataError, some_of
from dist_amp.loading.length_groups import grouped
from dist_amp.sources.load import class_names, load_split
from dist_amp.tasks import huggingface

MODELS = {"text": AutoModelForSequenceClassification, "image": AutoModelForImageClassification}
Batch = dict[str, Tensor]


@dataclass(eq=False)
class HFClassification(huggingface.FineTuning):
    """Columns of the data: data.text_column, with texts or images; label, with numbers or names,
    which are numbered in alphabetical order. Batch: the model's inputs, labels [B] int64.
    """

    classes: Annotated[int, Ge(2)]
    of: Literal["text", "image"] = "text"
    length: huggingface.Length = 512
    new_head = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == "text":
            self.processor = huggingface.open_tokenizer(self.folder)
        else:
            self.processor = huggingface.open_pretrained(AutoImageProcessor, self.folder)

    def build_model(self) -> nn.Module:
        tokenizer = self.processor if self.of == "text" else None
        return self.build(MODELS[self.of], tokenizer, num_labels=self.classes)

    @cached_property
    def training_rows(self) -> Any:
        return load_split(self.data, "train")

    @cached_property
    def names(self) -> Sequence[str]:
        """The names of the classes, by number; empty if labels are plain numbers."""
        names = class_names(self.training_rows, "label")
        if len(names) > self.classes:
            raise DataError(
                f"the column label names {len(names)} classes, such as {some_of(names)}, but "
                f"task.args.classes={self.classes}; set it to the number of classes"
            )
        return names

    def build_dataset(self, split: str) -> Any:
        rows = self.training_rows if split == "train" else load_split(self.data, split)
        if rows is None:
            return None
        if "label" not in rows.column_names:
            raise DataError(
                f"the rows have no column label; the columns are {', '.join(rows.column_names)}; "
                "rename one of them to label"
            )
        _ = self.names  # computed before loader workers copy the task
        if split != "train" or self.of == "image":
            return rows
        column = self.data.text_column
        return grouped(self.data, rows, lambda: [len(text or "") for text in rows[column]])

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """The model's inputs for texts, cut to `length` tokens, or for PIL images; and labels."""
        labels = [self.number_of(row["label"]) for row in rows]
        values = [row[self.data.text_column] for row in rows]
        if self.of == "text":
            inputs = self.processor(
                values, padding=True, truncation=True, max_length=self.length, return_tensors="pt"
            )
        else:
            images = [image.convert("RGB") for image in values]
            inputs = self.processor(images, return_tensors="pt")
        return {**inputs, "labels": torch.tensor(labels)}

    def number_of(self, label: Any) -> int:
        """The class number of a label, a number or a name. Raises ValueError for another label."""
        if isinstance(label, str) and label in self.names:
            return self.names.index(label)
        if isinstance(label, int | float) and label in range(self.classes):
            return int(label)
        known = f"0 to {self.classes - 1}"
        if isinstance(label, str):
            known = some_of(self.names) or "whole numbers"
        raise ValueError(f"label {label} is not one of task.args.classes={self.classes}: {known}")

    def weight(self, batch: Batch) -> float:
        return len(batch["labels"])

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """[B, classes] float32."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return model(**inputs).logits.float()  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(model, batch), batch["labels"], reduction="sum")

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        logits = self.logits(model, batch)
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
        return {"loss": loss, "accuracy": logits.argmax(1).eq(batch["labels"]).sum()}
