"""Models that dist_amp was not written around, of 50 M to 8 B parameters, on data of zeros."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = {"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 2048}
DEEP = {"num_hidden_layers": 8, "num_attention_heads": 12}
GROUPED = {**TEXT, **DEEP, "num_key_value_heads": 4}
LLAMA_8B = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
LLAMA_8B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
WHISPER = {"d_model": 512, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 32_000}
WHISPER |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8, "pad_token_id": 0}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {  # name: (class, kind, its config)
    "llama": ("LlamaForCausalLM", "text", GROUPED),
    "llama_8b": ("LlamaForCausalLM", "text", LLAMA_8B),
    "gpt2": ("GPT2LMHeadModel", "text", {"vocab_size": 32_000, "n_embd": 768, "n_layer": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "text", {**GROUPED, **EXPERTS}),
    "t5": ("T5ForConditionalGeneration", "both", {"vocab_size": 32_000, "num_layers": 6}),
    "dinov2": ("Dinov2ForImageClassification", "images", {**DEEP, "num_labels": 100}),
    "resnet": ("ResNetForImageClassification", "images", {"num_labels": 100}),
    "whisper": ("WhisperForConditionalGeneration", "speech", WHISPER),
}


class Zeros:
    """8,192 equal samples. Every value is a zero, of the dtype that the model takes."""

    def __init__(self, **shapes: tuple[int, ...]):
        self.shapes = shapes

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        dtypes = {"pixel_values": torch.float32, "input_features": torch.float32}
        return {
            name: torch.zeros(shape, dtype=dtypes.get(name, torch.int64))
            for name, shape in self.shapes.items()
        }


class Stranger:
    """A model of MODELS, by its name."""

    def __init__(self, name: str, length: int = 512):
        self.name, self.kind, options = MODELS[name]
        shapes: dict[str, dict[str, tuple[int, ...]]] = {
            "text": {"input_ids": (length,), "labels": (length,)},
            "both": {"input_ids": (length,), "labels": (length // 2,)},
            "images": {"pixel_values": (3, 224, 224), "labels": ()},
            "speech": {"input_features": (80, 3000), "labels": (length // 2,)},
        }
        self.shapes = shapes[self.kind]
        kind = getattr(transformers, self.name)
        self.config = kind.config_class(**options)
        self.config.use_cache = False

    def build_model(self) -> nn.Module:
        return getattr(transformers, self.name)(self.config)

    def build_dataset(self, split: str) -> Any:
        return Zeros(**self.shapes) if split == "train" else None

    def loss_sum(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]
        if self.kind in ("both", "speech"):
            inputs["decoder_input_ids"] = labels
        logits = model(**inputs).logits.float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    def weight(self, batch: dict[str, Tensor]) -> int:
        return batch["labels"].numel()
