"""Shared by the tasks for Hugging Face models: a model from its folder, LoRA, rows, samples."""

import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutput

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.settings import DataConfig
from dist_amp.sources.files import stay_local_without_network
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.tasks.loss_head import Chunk, LossHead, Reduction, losses_of
from dist_amp.tasks.packed_attention import Documents, PackedAttention, attend
from dist_amp.tasks.pretrained import load_pretrained

Length = Annotated[int, Ge(2)]  # of a sample, in tokens
Rank = Annotated[int, Ge(0)]  # of LoRA
# Types whose attention differs from a causal one only by a window, and takes keyword arguments.
PLAIN = ("gemma", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
OURS = "dist_amp"  # transformers' name of `attention`
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]


def model_folder(name: str) -> Path:
    """The local folder of a model, or the hub's files in the cache. Errors: DataError."""
    if Path(name).is_dir():
        return Path(name)
    stay_local_without_network()
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the library raises many types
        raise DataError(
            f"task.args.model={name} is no folder in {Path.cwd()}, and can't be fetched from the "
            f"hub: {first_line(error)}; check the name and the network, or give a local folder"
        ) from error


def opened(kind: Any, folder: Path, **options: Any) -> Any:
    """kind.from_pretrained(folder), of a config, tokenizer or processor. Errors: DataError."""
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many types, with many lines
        raise DataError(
            f"{kind.__name__} can't be read from {folder}: {first_line(error)}; give a folder that "
            "save_pretrained of the model and of the tokenizer or image processor wrote"
        ) from error


def open_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, with a padding token."""
    tokenizer = opened(AutoTokenizer, folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build(
    kind: Any, folder: Path, tokenizer: Any = None, as_saved: bool = False, **options: Any
) -> nn.Module:
    """A model of `kind` (AutoModelFor...) from the folder's config, which `options` override.

    as_saved: in the files' dtype, in place of float32.
    """
    config = opened(AutoConfig, folder, **options)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is not None and rows is not None:
        tokens = max(tokenizer.get_vocab().values()) + 1  # more than its length if ids have gaps
        if tokens > rows:
            raise DataError(
                f"the tokenizer in {folder} has {tokens} tokens and the model's embedding {rows} "
                "rows; use the model's own tokenizer, or save both after resize_token_embeddings"
            )
        config.get_text_config().pad_token_id = tokenizer.pad_token_id  # ends a classifier's text
    dtype = config.dtype if as_saved else torch.float32
    try:
        model = kind.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"task.args.model: {folder} is a {config.model_type} model, for which there is no "
            f"{kind.__name__}; use another task or model ({first_line(error)})"
        ) from error
    plain = config.model_type in PLAIN and model.config._attn_implementation == "sdpa"
    both_ways = getattr(config, "use_bidirectional_attention", False)  # Gemma's
    if plain and getattr(config, "is_causal", True) and not both_ways:
        model.config._attn_implementation = OURS
    if model.can_generate():
        with suppress(OSError):  # not every model has such a file
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return model  # type: ignore[no-any-return]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Documents | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' "sdpa", but with an empty mask causal, and within documents if given."""
    if documents is not None or (mask is not None and not mask.numel()):
        parts = (query, key, value)
        y, mask = attend(parts, documents, options["scaling"], options["dropout"])
        if y is not None:
            return y.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register(OURS, attention)
AttentionMaskInterface.register(OURS, sdpa_mask)  # for other calls, such as generate's


def takes_documents(config: Any, length: int) -> bool:
    """Whether a model's attention is `attention`, and no window is shorter than its rows."""
    window = getattr(config, "sliding_window", None) or length
    return bool(config._attn_implementation == OURS and window >= length)


def inputs_of(model: Any, batch: Any, how: PackedAttention = "auto") -> dict[str, Any]:
    """The arguments of a causal model's call, for rows padded on the right, or packed."""
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    config = getattr(model, "module", model).config  # of DDP
    length = batch["input_ids"].shape[1]
    bounds = batch.get("bounds")
    if takes_documents(config, length):
        # transformers looks for padding and restarts on the device, but not with four dimensions.
        inputs["attention_mask"] = batch["input_ids"].new_empty(0, 0, 0, 0)
        if bounds is not None:
            inputs["documents"] = Documents.of(batch["position_ids"], bounds, how)
    elif bounds is not None and "flash" in str(config._attn_implementation):
        # From position_ids transformers finds documents only at B = 1.
        inputs |= dict(zip(BOUNDS, (bounds, bounds, length, length), strict=True))
    inputs["use_cache"] = False
    return inputs


@dataclass(eq=False)
class FineTuning:
    """The base of these tasks: reads and writes the model's folder and its adapters.

    lora_rank: of low-rank adapters on frozen weights; 0: none. Source: arXiv:2106.09685.
    lora_targets: names of layers with commas between them, such as q_proj,v_proj; all-linear: every
    linear layer but the head. new_head: it is trained whole, and saved with the adapters.
    """

    data: DataConfig
    model: str
    lora_rank: Rank = field(default=0, kw_only=True)
    lora_targets: str = field(default="all-linear", kw_only=True)
    new_head: ClassVar[bool] = False
    processor: Any = field(init=False, repr=False)  # of what a sample is made of: a tokenizer, say

    def __post_init__(self) -> None:
        if self.lora_rank == 0 and self.lora_targets != "all-linear":
            raise ValueError(
                f"lora_targets={self.lora_targets} needs lora_rank above 0; set it, or leave "
                "lora_targets out"
            )
        self.folder = model_folder(self.model)

    def build(self, kind: Any, tokenizer: Any = None, **options: Any) -> nn.Module:
        """See `build`; with adapters. Errors: ConfigError for a target that matches no layer."""
        if self.lora_rank == 0:
            return build(kind, self.folder, tokenizer, **options)
        model: Any = build(kind, self.folder, tokenizer, as_saved=True, **options)
        modules = dict(model.named_modules())
        targets = [] if self.lora_targets == "all-linear" else self.lora_targets.split(",")
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in modules):
                linear = [name for name, part in modules.items() if isinstance(part, nn.Linear)]
                names = sorted({name.rpartition(".")[2] for name in linear})
                raise ConfigError(
                    f"task.args.lora_targets={self.lora_targets}: {target!r} matches no layer of "
                    f"{type(model).__name__}; its linear layers are {', '.join(names)}"
                )
        head = None
        if self.new_head:
            head = [
                name
                for name, part in model.named_children()
                if name != model.base_model_prefix and list(part.parameters())
            ]
        config = LoraConfig(
            r=self.lora_rank,
            lora_alpha=2 * self.lora_rank,
            target_modules=targets or self.lora_targets,
            modules_to_save=head,
        )
        with warnings.catch_warnings():
            # About what peft and transformers call of one another.
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(model, config)

    def load(self, model: Any) -> None:
        load_pretrained(model, self.folder, fresh_head=self.new_head)

    def units(self, model: Any) -> list[nn.Module]:
        """The model's embedding and head, unless they are tied or it does not have both."""
        if self.lora_rank or self.new_head:  # adapters, or a head on no embedding
            return []
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if embedding is None or head is None or embedding.weight is head.weight:
            return []
        return [embedding, head]

    def weight(self, batch: Any) -> float:
        return batch["counted"]  # type: ignore[no-any-return]

    def export(self, model: Any, folder: str) -> None:
        model.save_pretrained(folder)
        self.processor.save_pretrained(folder)


def make_loss_head(model: Any, chunk: Chunk) -> None:
    """Make the model's head one that computes the loss, unless the model changes its logits.

    Errors: ConfigError for such a model if a number of tokens is asked for.
    """
    if chunk == "off":
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and returns_the_heads_logits(base):
        head.__class__ = LossHead
        head.chunk = chunk
    elif chunk != "auto":
        raise ConfigError(
            f"task.args.loss_chunk={chunk} needs a model whose logits are those of a linear head "
            f"without bias, and {type(base).__name__} is none; use auto or off"
        )


@torch.no_grad()
def returns_the_heads_logits(model: Any) -> bool:
    """Whether the model returns what its head does: some cap or scale it. Tried on one token."""
    made: list[Any] = []
    head = model.get_output_embeddings()
    body = model.base_model
    hidden = Hidden(last_hidden_state=head.weight[None, :1])
    body.forward = lambda *args, **kwargs: hidden
    hook = head.register_forward_hook(lambda module, inputs, output: made.append(output))
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
        output = model(input_ids=ids, use_cache=False)
        return len(made) == 1 and output.logits is made[0]
    except Exception:  # of any model's code
        return False
    finally:
        hook.remove()
        del body.forward


class Hidden(BaseModelOutput):
    """The part of a body's output that the head reads; the rest is passed on."""

    def __getattr__(self, name: str) -> None:
        return None


def next_token_losses(
    model: Any, inputs: dict[str, Any], labels: Tensor, reduction: Reduction
) -> tuple[Tensor, Any]:
    """Returns (LossHead's losses for labels [B, T], the model's output).

    The last losses of each row are 0, of no label.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    head = getattr(model, "module", model).get_output_embeddings()  # of DDP
    if not isinstance(head, LossHead):
        output = model(**inputs)
        return losses_of(output.logits, targets, reduction), output
    with head.losses_of(targets, reduction):
        output = model(**inputs)
    return output.logits, output
