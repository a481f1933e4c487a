"""Fine-tune a classifier of texts or images by its name on the hub or its folder; a base model gets a new head."""

from typing import Annotated, Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoModelForImageClassification, AutoModelForSequenceClassification

from dist_amp.checkpoint.pretrained import load_pretrained
from dist_amp.config.range import Range
from dist_amp.settings import DataConfig
from dist_amp.sources.length_groups import grouped
from dist_amp.tasks import huggingface

MODELS = {"text": AutoModelForSequenceClassification, "image": AutoModelForImageClassification}


class HFClassification:
    """Rows: data.text_column, a text or image; label. Batch: the model's inputs, and labels [B] int64."""

    def __init__(
        self, data: DataConfig, model: str, classes: Annotated[int, Range(low=2)],
        of: Literal["text", "image"] = "text", length: Annotated[int, Range(low=2)] = 512,
        lora_rank: int = 0, lora_targets: str = "all-linear",
    ):  # fmt: skip
        self.data, self.classes, self.of, self.length = data, classes, of, length
        self.lora = huggingface.Lora(lora_rank, lora_targets, new_head=True)
        self.folder = huggingface.model_folder(model)
        self.tokenizer = huggingface.open_tokenizer(self.folder) if of == "text" else None
        self.images = huggingface.opened(AutoImageProcessor, self.folder) if of == "image" else None

    def build_model(self) -> nn.Module:
        return huggingface.build(MODELS[self.of], self.folder, self.lora, self.tokenizer, num_labels=self.classes)

    def load(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder, fresh_head=True)

    def build_dataset(self, split: str) -> Any:
        rows, column = huggingface.labelled_rows(self.data, split), self.data.text_column
        characters = (lambda: [len(text or "") for text in rows[column]]) if self.of == "text" else None
        return grouped(self.data, rows, characters) if split == "train" else rows

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        values, labels = [row[self.data.text_column] for row in rows], [row["label"] for row in rows]
        return huggingface.labelled(self.tokenizer or self.images, values, labels, self.classes, self.length)

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.metrics(model, batch)["loss"]

    def weight(self, batch: dict[str, Tensor]) -> float:
        return len(batch["labels"])

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits.float()
        right = (logits.argmax(1) == batch["labels"]).sum()
        return {"loss": F.cross_entropy(logits, batch["labels"], reduction="sum"), "accuracy": right}

    def export(self, model: nn.Module, folder: str) -> None:
        huggingface.save_pretrained(model, self.tokenizer or self.images, folder)
