"""Train a causal language model on preferences by DPO (arXiv:2305.18290), in full or with LoRA.

python -m dist_amp.train --task.target examples/preference.py:DPO --data.path pairs.jsonl \
    --task.args.model Qwen/Qwen2.5-0.5B-Instruct --train.micro_batch_size 4 --optim.lr 1e-6 \
    --optim.weight_decay 0

Columns of the data: prompt, chosen and rejected: texts, or lists of messages. The reference model
is a frozen copy of the model or, with `--task.args.lora_rank 16`, the model without adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dist_amp.errors import DataError
from dist_amp.sources.conversations import encode
from dist_amp.sources.load import Converted, load_split
from dist_amp.sources.packing import Packing
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.tasks import huggingface
from dist_amp.tasks.loss_head import Chunk
from dist_amp.tasks.pretrained import load_pretrained

Batch = dict[str, Any]
COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(eq=False)
class DPO(huggingface.FineTuning):
    """Batch: input_ids, attention_mask, labels [2 B, T]: B chosen answers, then B rejected ones.

    reference: the name or folder of another reference model, with the same tokenizer.
    """

    beta: float = 0.1
    length: huggingface.Length = 1024
    pad_to_multiple_of: int = 128
    loss_chunk: Chunk = "auto"
    reference: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = self.processor = huggingface.open_tokenizer(self.folder)
        self.encoder = of_transformers(self.tokenizer)  # made once: it hashes the whole vocabulary
        self.reference_folder = self.folder
        if self.reference != "auto":
            self.reference_folder = huggingface.model_folder(self.reference)
        self.has_copy = self.reference != "auto" or self.lora_rank == 0

    def build_model(self) -> nn.Module:
        policy = self.build(AutoModelForCausalLM, self.tokenizer)
        huggingface.make_loss_head(policy, self.loss_chunk)
        if not self.has_copy:
            return WithReference(policy, None)
        reference = huggingface.build(AutoModelForCausalLM, self.reference_folder, self.tokenizer)
        huggingface.make_loss_head(reference, self.loss_chunk)
        return WithReference(policy, reference.requires_grad_(False))

    def load(self, model: Any) -> None:
        super().load(model.policy)
        if self.has_copy:
            load_pretrained(model.reference, self.reference_folder)

    def units(self, model: Any) -> list[nn.Module]:
        if self.lora_rank:
            return []
        return super().units(model.policy) + super().units(model.reference)

    def build_dataset(self, split: str) -> Any:
        rows = load_split(self.data, split, *COLUMNS)
        if rows is None:
            return None
        if missing := [name for name in COLUMNS if name not in rows.column_names]:
            there = ", ".join(rows.column_names)
            raise DataError(f"the rows have no column {missing[0]}; their columns are {there}")
        return Converted(rows, self.pair)

    def pair(self, row: Batch) -> list[Batch]:
        """[chosen, rejected] as `encoded` rows. Raises DataError if both have the same tokens."""
        pair = [self.encoded(row, name) for name in COLUMNS[1:]]
        if pair[0]["input_ids"].tolist() == pair[1]["input_ids"].tolist():
            raise DataError(
                f"chosen and rejected are equal within task.args.length={self.length} tokens, so "
                "there is nothing to prefer; remove the row, or use a greater length"
            )
        return pair

    def encoded(self, row: Batch, name: str) -> Batch:
        """Tokens of the prompt and row[name], cut to `length`; the prompt's labels are ignored."""
        answer = row[name]
        if isinstance(row["prompt"], list) and not self.tokenizer.chat_template:
            raise DataError("the rows are chats, but the tokenizer has no template; use texts")
        ids, labels = encode({"prompt": row["prompt"], "completion": answer}, self.encoder, name)
        labels = labels[: self.length]
        is_blank = isinstance(answer, str) and not answer.strip()
        if is_blank or all(label == IGNORE_INDEX for label in labels[1:]):
            raise DataError(
                f"the row's {name} answer is empty, or begins after the first task.args.length="
                f"{self.length} of its {len(ids)} tokens; use a greater length, or remove the row"
            )
        return {"input_ids": torch.tensor(ids[: self.length]), "labels": torch.tensor(labels)}

    def collate(self, pairs: list[list[Batch]]) -> Batch:
        sides = [pair[side] for side in (0, 1) for pair in pairs]
        pad_id = self.tokenizer.pad_token_id or 0
        rows = Packing(self.length, "off", "truncate", self.pad_to_multiple_of)
        return rows.collate(sides, pad_id, attention_mask=True)

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"]

    def rewards(self, model: nn.Module, batch: Batch) -> Tensor:
        """beta x (the answer's log-probability - that of the reference): [2, B] float32."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        policy, reference = model(**inputs)
        return self.beta * (policy - reference).view(2, -1)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        chosen, rejected = self.rewards(model, batch)
        return -F.logsigmoid(chosen - rejected).sum()

    def weight(self, batch: Batch) -> float:
        return len(batch["labels"]) / 2  # the number of pairs

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        """Sums over the pairs: the loss; how often chosen has the greater reward; the margin."""
        chosen, rejected = self.rewards(model, batch)
        return {
            "loss": -F.logsigmoid(chosen - rejected).sum(),
            "accuracy": (chosen > rejected).sum(),
            "margin": (chosen - rejected).sum(),
        }

    def export(self, model: Any, folder: str) -> None:
        super().export(model.policy, folder)


class WithReference(nn.Module):
    """The policy and its reference model; None: the policy without adapters is the reference."""

    def __init__(self, policy: nn.Module, reference: nn.Module | None):
        super().__init__()
        self.policy: Any = policy
        self.reference = reference

    def train(self, mode: bool = True) -> "WithReference":
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """[2 B, T] each -> log-probabilities [2 B] of (the policy, the reference)."""
        with torch.no_grad():
            if self.reference is not None:
                reference = log_probabilities(self.reference, batch)
            else:
                with without_adapters(self.policy):
                    reference = log_probabilities(self.policy, batch)
        return log_probabilities(self.policy, batch), reference

    def merge_and_unload(self) -> "WithReference":
        """For `export --merge`."""
        self.policy = self.policy.merge_and_unload()
        return self


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability of each row's answer, summed over its tokens: [rows] float32."""
    inputs = huggingface.inputs_of(model, batch)
    losses, _ = huggingface.next_token_losses(model, inputs, batch["labels"], "none")
    return -losses.view_as(batch["labels"]).sum(1)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context without adapters and dropout. (peft's disable_adapter would freeze the adapters.)"""
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    training = model.training
    model.eval()
    for layer in layers:
        layer.set_scale("default", 0.0)
    try:
        yield
    finally:
        model.train(training)
        for layer in layers:
            layer.set_scale("default", 1.0)
