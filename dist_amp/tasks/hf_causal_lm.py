"""Fine-tune a causal language model from the Hugging Face hub or a folder, in full or with LoRA.

Columns of the data: messages; or prompt and completion; or data.text_column. With
data.pack=best_fit, documents share rows; a model that attends across them is rejected.

Docs: docs/huggingface.md
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForCausalLM

from dist_amp.errors import ConfigError
from dist_amp.settings import Count, DataConfig
from dist_amp.sources.mixture import losses_by_source, mixed, tables_of
from dist_amp.sources.packing import Packing, TokenShares
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.sources.tokens import token_documents
from dist_amp.tasks import huggingface
from dist_amp.tasks.huggingface import inputs_of, next_token_losses, takes_documents
from dist_amp.tasks.loss_head import Reduction
from dist_amp.tasks.packed_attention import PackedAttention, document_bounds

# Largest `leaked_share` of a model that keeps documents apart. Measured on tiny models: 0 in Llama,
# Qwen3, GPT-2, Gemma 3 and Mixtral; 1e-4 (LFM2's short convolutions) to 0.7 (Mamba 2) in models
# that leak. Float32 rounds by 1e-7, and a kernel's rounding may depend on other tokens.
LEAK = 1e-5
Batch = dict[str, Any]


@dataclass(eq=False)
class HFCausalLM(huggingface.FineTuning):
    """Predict the next token. Batch: input_ids, labels [B, T] int64, counts; attention_mask if
    pack=off; position_ids and bounds if pack=best_fit: see `Packing.collate`, `document_bounds`.
    """

    length: huggingface.Length = 1024
    pad_to_multiple_of: Count = 128
    loss_chunk: Count | Literal["auto", "off"] = "auto"
    packed_attention: PackedAttention = "auto"
    prompt: str = "Hello"
    sample_tokens: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = self.processor = huggingface.open_tokenizer(self.folder)
        self.packing = Packing.of(self.data, self.length, "off", self.pad_to_multiple_of)
        self.source_names = list(tables_of(self.data))
        self.shares = TokenShares(self.source_names)
        # An iterator: a flag that changes would cause the warning about state that is not saved.
        self.first_log_step = iter([True])
        self.balance = 0.0  # coefficient of a mixture of experts' load-balancing loss

    def build_model(self) -> nn.Module:
        model: Any = self.build(AutoModelForCausalLM, self.tokenizer)
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_positions and self.packing.length > max_positions:
            raise ConfigError(
                f"task.args.length={self.packing.length} is more than the model's {max_positions} "
                f"positions (max_position_embeddings); use at most {max_positions}"
            )
        huggingface.make_loss_head(model, self.loss_chunk)
        self.balance = getattr(model, "router_aux_loss_coef", 0.0)
        return model  # type: ignore[no-any-return]

    def build_dataset(self, split: str) -> Any:
        def rows_of(source: DataConfig) -> Any:
            documents = token_documents(source, split, of_transformers(self.tokenizer))
            return self.packing.rows(documents, split)

        return mixed(self.data, split, rows_of)

    def collate(self, samples: list[Batch]) -> Batch:
        pad_id = self.tokenizer.pad_token_id or 0
        batch = self.packing.collate(samples, pad_id, attention_mask=self.packing.pack == "off")
        if "position_ids" in batch:
            batch["bounds"] = document_bounds(batch["position_ids"])
        return batch

    def tokens(self, batch: Batch) -> int:
        return self.shares.count(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if not self.balance or not model.training:
            return self.losses(model, batch, "sum")[0]
        loss, output = self.losses(model, batch, "sum", output_router_logits=True)
        balance = torch.as_tensor(output.aux_loss).float()  # a Python number without experts
        return loss + self.balance * self.weight(batch) * balance

    def losses(
        self, model: nn.Module, batch: Batch, reduction: Reduction, **options: Any
    ) -> tuple[Tensor, Any]:
        inputs = inputs_of(model, batch, self.packed_attention)
        return next_token_losses(model, {**inputs, **options}, batch["labels"], reduction)

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        (losses, hits), _ = self.losses(model, batch, "hits")
        values = {"loss": losses.sum(), "accuracy": hits.sum()}
        if not self.source_names:
            return values
        losses = losses.view_as(batch["labels"])[:, :-1]
        labels = batch["labels"][:, 1:]
        source_ids = batch["source_ids"][:, 1:]
        return values | losses_by_source(losses, labels, source_ids, self.source_names)

    def train_metrics(self, run: Any, report: Any) -> Batch:
        """Shares of padding and of target tokens; the first call also checks the documents."""
        if self.packing.pack == "best_fit" and next(self.first_log_step, False):
            check_documents_are_apart(run, self.packed_attention)
        return self.shares.read(run.world)

    def sample(self, model: Any) -> str:
        """The prompt and its greedy continuation, or a chat model's answer. All ranks call it."""
        register_fsdp_forward_method(model, "generate")
        tokenizer = self.tokenizer
        inputs = tokenizer(self.prompt, return_tensors="pt")
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": self.prompt}]
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            inputs = tokenizer.apply_chat_template(turn, **options)
        inputs = inputs.to(next(model.parameters()).device)
        ids = model.generate(**inputs, max_new_tokens=self.sample_tokens, do_sample=False)[0]
        if tokenizer.chat_template:
            answer = ids[inputs["input_ids"].shape[1] :]
            return f"{self.prompt}\n{tokenizer.decode(answer, skip_special_tokens=True)}"
        return tokenizer.decode(ids, skip_special_tokens=True)  # type: ignore[no-any-return]


def check_documents_are_apart(run: Any, how: PackedAttention) -> None:
    """Raises ConfigError, on all ranks, for a model that attends across packed documents."""
    batch = run.data.last_step[0][0]
    batch = getattr(batch, "batch", batch)  # a Padding wraps a batch
    model = run.parallel.module
    precisions = [run.precision.autocast]
    if not takes_documents(model.config, batch["input_ids"].shape[1]):
        # Decide in float32: in lower precision, an expert's rounding depends on its other tokens.
        precisions.append(nullcontext)
    for precision in precisions:
        with run.evaluating(), precision():
            share = leaked_share(model, batch["input_ids"], how)
        worst = max(run.world.gather(share))
        if worst <= LEAK:
            return
    raise ConfigError(
        "data.pack=best_fit needs a model that separates documents by position_ids, but in "
        f"{type(model).__name__} a change of a row's first document changes the second's logits "
        f"{worst:.1g} times as much as the first's; use data.pack=off"
    )


def leaked_share(model: Any, input_ids: Tensor, how: PackedAttention = "auto") -> float:
    """Change of the second document's logits, relative to the first's, if the first changes.

    Each half of a row of input_ids [B, T] is a document. 0 if the logits can't show it: they don't
    change, as with a head of zeros, or are nan.
    """
    half = input_ids.shape[1] // 2
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    positions = torch.where(positions < half, positions, positions - half).expand_as(input_ids)
    other_ids = torch.where(input_ids > 0, input_ids - 1, 1)  # still in the vocabulary
    changed = torch.cat((other_ids[:, :half], input_ids[:, half:]), dim=1)
    batch = {"position_ids": positions, "bounds": document_bounds(positions)}
    logits = [
        model(**inputs_of(model, {**batch, "input_ids": ids}, how)).logits.float()
        for ids in (input_ids, changed)
    ]
    change = (logits[0] - logits[1]).abs()
    share = change[:, half:].max() / change[:, :half].max()
    return float(share.nan_to_num(0, 0))
