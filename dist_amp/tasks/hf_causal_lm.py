"""Fine-tune a causal language model by its name on the Hugging Face hub or its folder, whole or with LoRA."""

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dist_amp.checkpoint.pretrained import load_pretrained
from dist_amp.config.range import Range
from dist_amp.errors import ConfigError
from dist_amp.settings import DataConfig
from dist_amp.sources import conversations
from dist_amp.sources.packing import Packing
from dist_amp.sources.shares import TokenShares
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.sources.tokens import token_documents
from dist_amp.tasks import huggingface

# A second document's change by other tokens in the first, over the first's own: 0 in Llama, Qwen3, GPT-2, Gemma 3 and
# Mixtral, in float32 and bf16; 1e-4 (LFM2's short convolutions) to 0.7 (Mamba 2) where it leaks. Measured on tiny ones;
# float32 rounds by 1e-7, should a kernel's sums depend on other tokens.
LEAK = 1e-5


class HFCausalLM:
    """Rows: messages; or prompt and completion; or data.text_column.

    Batch: see `conversations.padded`; with data.pack set, `Packing.collate`.
    """

    def __init__(
        self, data: DataConfig, model: str, length: Annotated[int, Range(low=2)] = 1024,
        lora_rank: int = 0, lora_targets: str = "all-linear", prompt: str = "Hello", sample_tokens: int = 50,
    ):  # fmt: skip
        self.data, self.length, self.prompt, self.sample_tokens = data, length, prompt, sample_tokens
        self.lora = huggingface.Lora(lora_rank, lora_targets)
        self.folder = huggingface.model_folder(model)
        self.tokenizer = huggingface.open_tokenizer(self.folder)
        self.packing = Packing.of(data, length, auto="off")
        self.shares = TokenShares()
        self._leak_checked = self.packing.pack != "best_fit"

    def build_model(self) -> nn.Module:
        model = huggingface.build(AutoModelForCausalLM, self.folder, self.lora, self.tokenizer)
        huggingface.check_positions(model, self.length)
        return model

    def load(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [] if self.lora.rank else huggingface.embedding_and_head(model)

    def build_dataset(self, split: str) -> Any:
        if self.packing.pack == "off":
            return conversations.tokenized(self.data, split, self.tokenizer, self.length)
        documents = token_documents(self.data, split, of_transformers(self.tokenizer))
        return self.packing.rows(documents, split)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        pad_id = self.tokenizer.pad_token_id or 0
        return conversations.padded(samples, pad_id) if self.packing.pack == "off" else self.packing.collate(samples, pad_id)

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(*next_tokens(model, batch), reduction="sum")

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"][:, 1:] >= 0).sum()

    def tokens(self, batch: dict[str, Tensor]) -> int:
        tokens = int(batch["lengths"].sum() if "lengths" in batch else batch["attention_mask"].sum())
        self.shares.add(batch["labels"], tokens, batch.get("source_ids"))
        return tokens

    def train_metrics(self, run: Any, report: Any) -> dict[str, float]:
        if not self._leak_checked:  # once, at the first log step: in evaluation, and by all ranks
            self._leak_checked = True
            batch = run.data.handed_out[0][0]
            with run.parallel.evaluating():
                check_documents_apart(run.parallel.module, getattr(batch, "batch", batch)["input_ids"])
        return self.shares.read()

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits, labels = next_tokens(model, batch)
        return {"loss": F.cross_entropy(logits, labels, reduction="sum"), "accuracy": logits.argmax(1).eq(labels).sum()}

    def sample(self, model: nn.Module) -> str:
        chat = conversations.asks_in_turns(self.data, self.tokenizer)
        return huggingface.continued(model, self.tokenizer, self.prompt, self.sample_tokens, chat)

    def export(self, model: nn.Module, folder: str) -> None:
        huggingface.save_pretrained(model, self.tokenizer, folder)


def next_tokens(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(logits [B (T - 1), vocabulary] float32, labels [B (T - 1)]) of every token but the first of each row."""
    if "attention_mask" in batch:
        inputs = {"attention_mask": batch["attention_mask"]}
    else:  # a mask, even of ones, or a cache would keep transformers from telling packed documents by their positions
        inputs = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
    output = model(input_ids=batch["input_ids"], **inputs, use_cache=False)
    return output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()


def check_documents_apart(model: Any, input_ids: Tensor) -> None:
    """Refuse a model in which a packed row's second document sees the first.

    The rows' halves [B, T] are taken for two documents: other tokens in the first must leave the second's logits.
    It takes two forwards, and says nothing of the training mode; `verify` does. Errors: ConfigError.
    """
    half = input_ids.shape[1] // 2
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    positions = torch.where(positions < half, positions, positions - half).expand_as(input_ids)
    changed = torch.cat((input_ids[:, :half].roll(1, dims=1) ^ 1, input_ids[:, half:]), dim=1)
    a, b = (model(input_ids=ids, position_ids=positions, use_cache=False).logits for ids in (input_ids, changed))
    first, second = (a.float() - b.float()).abs().split((half, input_ids.shape[1] - half), dim=1)
    share = float(second.max() / first.max())
    if not share <= LEAK:
        raise ConfigError(
            f"data.pack=best_fit needs a model that tells packed documents by position_ids: in {type(model).__name__} "
            f"another first document changes the second's logits, {share:.1g} times as much as its own; use data.pack=off"
        )
