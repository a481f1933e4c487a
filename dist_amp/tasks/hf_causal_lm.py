"""Fine-tune a causal language model by its name on the Hugging Face hub or its folder, whole or with LoRA."""

from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dist_amp.checkpoint.pretrained import load_pretrained
from dist_amp.config.range import Range
from dist_amp.settings import DataConfig
from dist_amp.sources import conversations
from dist_amp.sources.mixture import losses_by_source
from dist_amp.tasks import huggingface
from dist_amp.tasks.packed import TokenRows, check_positions, next_tokens


class HFCausalLM(TokenRows):
    """Rows: messages; or prompt and completion; or data.text_column. Batch: see `TokenRows`."""

    def __init__(
        self, data: DataConfig, model: str, length: Annotated[int, Range(low=2)] = 1024,
        lora_rank: int = 0, lora_targets: str = "all-linear", prompt: str = "Hello", sample_tokens: int = 50,
    ):  # fmt: skip
        self.prompt, self.sample_tokens = prompt, sample_tokens
        self.lora = huggingface.Lora(lora_rank, lora_targets)
        self.folder = huggingface.model_folder(model)
        super().__init__(data, length, huggingface.open_tokenizer(self.folder))

    def build_model(self) -> nn.Module:
        model = huggingface.build(AutoModelForCausalLM, self.folder, self.lora, self.tokenizer)
        return check_positions(model, self.packing.length)

    def load(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [] if self.lora.rank else huggingface.embedding_and_head(model)

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(*next_tokens(model, batch), reduction="sum")

    def metrics(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        logits, labels = next_tokens(model, batch)
        losses = F.cross_entropy(logits, labels, reduction="none")
        values = {"loss": losses.sum(), "accuracy": logits.argmax(1).eq(labels).sum()}
        if not self.sources:
            return values
        return values | losses_by_source(losses, labels, batch["source_ids"][:, 1:].flatten(), self.sources)

    def sample(self, model: nn.Module) -> str:
        chat = conversations.asks_in_turns(self.data, self.tokenizer)
        return huggingface.continued(model, self.tokenizer, self.prompt, self.sample_tokens, chat)

    def export(self, model: nn.Module, folder: str) -> None:
        huggingface.save_pretrained(model, self.tokenizer, folder)
