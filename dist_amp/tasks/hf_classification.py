"""Fine-tune a classifier of texts or images from a Hugging Face model; a base model gets a head."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from dist_amp.errors import DataError
from dist_amp.loading.length_groups import grouped
from dist_amp.settings import Range
from dist_amp.sources.load import load_split
from dist_amp.tasks import huggingface

MODELS = {"text": AutoModelForSequenceClassification, "image": AutoModelForImageClassification}
Batch = dict[str, Tensor]


@dataclass(eq=False)
class HFClassification(huggingface.FineTuning):
    """Rows: data.text_column, a text or image; label. Batch: the model's inputs, labels [B]."""

    classes: Annotated[int, Range(low=2)]
    of: Literal["text", "image"] = "text"
    length: huggingface.Length = 512
    new_head = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.of == "text":
            self.processor = huggingface.open_tokenizer(self.folder)
        else:
            self.processor = huggingface.opened(AutoImageProcessor, self.folder)

    def build_model(self) -> nn.Module:
        tokenizer = self.processor if self.of == "text" else None
        return self.build(MODELS[self.of], tokenizer, num_labels=self.classes)

    def build_dataset(self, split: str) -> Any:
        rows = load_split(self.data, split)
        if rows is None:
            return None
        if "label" not in rows.column_names:
            raise DataError(
                f"the rows have no column label; the columns are {', '.join(rows.column_names)}: "
                "rename one"
            )
        if split != "train" or self.of == "image":
            return rows
        column = self.data.text_column
        return grouped(self.data, rows, lambda: [len(text or "") for text in rows[column]])

    def collate(self, rows: list[dict[str, Any]]) -> Batch:
        """The model's inputs of texts, of at most `length` tokens, or of images (PIL); labels."""
        labels = [row["label"] for row in rows]
        for label in labels:
            if not 0 <= label < self.classes:
                known = f"task.args.classes={self.classes}: 0 to {self.classes - 1}"
                raise ValueError(f"label {label} is not one of {known}")
        values = [row[self.data.text_column] for row in rows]
        if self.of == "text":
            inputs = self.processor(
                values,
                padding=True,
                truncation=True,
                max_length=self.length,
                return_tensors="pt",
            )
        else:
            images = [image.convert("RGB") for image in values]
            inputs = self.processor(images, return_tensors="pt")
        return {**inputs, "labels": torch.tensor(labels)}

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
