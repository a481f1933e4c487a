"""What packed rows ask of a Hugging Face model: how it is called, and that it keeps the documents of a row apart."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dist_amp.errors import ConfigError
from dist_amp.settings import DataConfig
from dist_amp.sources.mixture import mixed, tables_of
from dist_amp.sources.packing import Packing
from dist_amp.sources.shares import TokenShares
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.sources.tokens import token_documents

# A second document's change by other tokens in the first, over the first's own: 0 in Llama, Qwen3, GPT-2, Gemma 3 and
# Mixtral, in float32 and bf16; 1e-4 (LFM2's short convolutions) to 0.7 (Mamba 2) where it leaks. Measured on tiny ones;
# float32 rounds by 1e-7, should a kernel's sums depend on other tokens.
LEAK = 1e-5


class TokenRows:
    """The data's side of a task: documents as rows of at most `length` tokens, by a tokenizer of transformers.

    Batch: of `Packing.collate`, with an attention_mask if data.pack=off.
    """

    def __init__(self, data: DataConfig, length: int, tokenizer: Any):
        self.data, self.tokenizer = data, tokenizer
        self.packing = Packing.of(data, length, auto="off")
        self.sources = list(tables_of(data))
        self.shares = TokenShares(self.sources)
        self._leak_checked = self.packing.pack != "best_fit"

    def build_dataset(self, split: str) -> Any:
        return mixed(self.data, split, partial(self.documents, split), partial(self.packing.rows, split=split))

    def documents(self, split: str, data: DataConfig) -> Any:
        return token_documents(data, split, of_transformers(self.tokenizer))

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Any]:
        return self.packing.collate(samples, self.tokenizer.pad_token_id or 0, self.packing.pack == "off")

    def weight(self, batch: dict[str, Any]) -> int:
        return batch["counted"]  # type: ignore[no-any-return]

    def tokens(self, batch: dict[str, Any]) -> int:
        return self.shares.count(batch)

    def train_metrics(self, run: Any, report: Any) -> dict[str, Tensor]:
        """Shares of padding and of what counts; at the first log step also checks that documents are kept apart."""
        self._leak_checked = self._leak_checked or self._documents_are_apart(run)
        return self.shares.read(run.world)

    def _documents_are_apart(self, run: Any) -> bool:
        """Refuse a model in which documents of a row see one another; False if the logits of a rank do not tell yet.

        Every rank comes to the same answer: one that went on alone would leave the others in a sharded forward.
        Errors: ConfigError.
        """
        batch = run.data.handed_out[0][0]
        with run.parallel.evaluating(), run.precision.autocast():
            own = leaked_share(run.parallel.module, getattr(batch, "batch", batch)["input_ids"][:1])
        shares = [share for (share,) in run.world.gather_numbers([own])]
        told = [share for share in shares if math.isfinite(share)]  # not a head of zeros, nor a run that has diverged
        if (worst := max(told, default=0.0)) > LEAK:
            raise ConfigError(
                "data.pack=best_fit needs a model that separates documents by position_ids: in "
                f"{type(run.parallel.module).__name__} another first document changes the second's logits, {worst:.1g} "
                "as much as its own; use data.pack=off"
            )
        return len(told) == len(shares)


def next_tokens(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(logits [B (T - 1), vocabulary] float32, labels [B (T - 1)]) of every token but the first of each row."""
    # transformers recognises packed documents by positions that restart, but not with a mask, even of ones, or a cache.
    inputs = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
    output = model(input_ids=batch["input_ids"], **inputs, use_cache=False)
    return output.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()


def leaked_share(model: Any, input_ids: Tensor) -> float:
    """How much other tokens in a row's first document change the second's logits, over how much the first's own.

    The halves of input_ids [B, T] are taken for two documents. It takes two forwards, and says nothing of the training
    mode; `verify` does. Not finite if the logits do not tell.
    """
    half = input_ids.shape[1] // 2
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    positions = torch.where(positions < half, positions, positions - half).expand_as(input_ids)
    others = torch.where(input_ids > 0, input_ids - 1, 1)  # ids that the vocabulary has
    changed = torch.cat((others[:, :half], input_ids[:, half:]), dim=1)
    a, b = (model(input_ids=ids, position_ids=positions, use_cache=False).logits for ids in (input_ids, changed))
    first, second = (a.float() - b.float()).abs().split((half, input_ids.shape[1] - half), dim=1)
    return float(second.max() / first.max())


def check_positions(model: Any, length: int) -> Any:
    """The model. Errors: ConfigError for rows longer than it has positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and length > most:
        raise ConfigError(
            f"task.args.length={length} is more than the model's {most} positions (max_position_embeddings); use at "
            f"most {most}"
        )
    return model
