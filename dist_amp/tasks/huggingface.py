"""What the tasks for Hugging Face models share: building a model, LoRA, packed rows, the loss."""

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

Length = Annotated[int, Ge(2)]  # tokens in a sample, at most
# Model types whose forward passes keyword arguments on to causal attention, some with a window.
PLAIN = ("gemma", "gpt2", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
ATTENTION = "dist_amp"  # the name under which transformers knows `attention`
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # for flash attention
FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]  # to download


def model_folder(name: str) -> Path:
    """The local folder `name`, or that of a model downloaded from the hub. Raises DataError."""
    if Path(name).is_dir():
        return Path(name)
    stay_local_without_network()
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the library raises many types
        raise DataError(
            f"task.args.model={name} is not a folder in {Path.cwd()} and can't be fetched from the "
            f"hub: {first_line(error)}; check the name and the network, or give a local folder"
        ) from error


def open_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """kind.from_pretrained(folder), for a config, tokenizer or processor. Raises DataError."""
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many types, with many lines
        raise DataError(
            f"{kind.__name__} can't be read from {folder}: {first_line(error)}; give a folder to "
            "which save_pretrained has written the model and its tokenizer or image processor"
        ) from error


def open_tokenizer(folder: Path) -> Any:
    tokenizer = open_pretrained(AutoTokenizer, folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build(
    kind: Any, folder: Path, tokenizer: Any = None, as_saved: bool = False, **options: Any
) -> nn.Module:
    """A model of `kind` (AutoModelFor...) from the folder's config, which `options` override.

    Its weights are not loaded yet. as_saved: in the files' dtype, not in float32.
    """
    config = open_pretrained(AutoConfig, folder, **options)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is not None and rows is not None:
        tokens = max(tokenizer.get_vocab().values()) + 1  # not len(): the ids may have gaps
        if tokens > rows:
            raise DataError(
                f"the tokenizer in {folder} has {tokens} tokens and the model's embedding {rows} "
                "rows; use the model's own tokenizer, or save both after resize_token_embeddings"
            )
        # A sequence classifier finds the last token of a text by it.
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    dtype = config.dtype if as_saved else torch.float32
    try:
        model = kind.from_config(config, dtype=dtype)
    except ValueError as error:
        raise ConfigError(
            f"task.args.model: {folder} is a {config.model_type} model, for which there is no "
            f"{kind.__name__}; use another task or model ({first_line(error)})"
        ) from error
    is_plain = config.model_type in PLAIN and model.config._attn_implementation == "sdpa"
    is_bidirectional = getattr(config, "use_bidirectional_attention", False)  # an option of Gemma
    if is_plain and getattr(config, "is_causal", True) and not is_bidirectional:
        model.config._attn_implementation = ATTENTION
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
    """transformers' "sdpa", but causal for an empty mask, and within `documents` if given."""
    if documents is not None or (mask is not None and not mask.numel()):
        qkv = (query, key, value)
        y, mask = attend(qkv, documents, options["scaling"], options["dropout"])
        if y is not None:
            return y.transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, mask, **options)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # for other calls, such as generate's


def takes_documents(config: Any, length: int) -> bool:
    """Whether the model uses `attention`, with no sliding window shorter than its rows."""
    window = getattr(config, "sliding_window", None) or length
    return bool(config._attn_implementation == ATTENTION and window >= length)


def inputs_of(model: Any, batch: Any, how: PackedAttention = "auto") -> dict[str, Any]:
    """Keyword arguments of a causal model's forward, for rows padded on the right, or packed."""
    names = ("input_ids", "attention_mask", "position_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    config = getattr(model, "module", model).config  # DDP's module
    length = batch["input_ids"].shape[1]
    bounds = batch.get("bounds")
    if takes_documents(config, length):
        # With a mask of four dimensions, transformers searches neither the mask for padding nor
        # position_ids for documents, which would each synchronise with the host.
        inputs["attention_mask"] = batch["input_ids"].new_empty(0, 0, 0, 0)
        if bounds is not None:
            inputs["documents"] = Documents.of(batch["position_ids"], bounds, how)
    elif bounds is not None and "flash" in str(config._attn_implementation):
        # transformers itself finds documents in position_ids only if B = 1.
        inputs |= dict(zip(BOUNDS, (bounds, bounds, length, length), strict=True))
    inputs["use_cache"] = False
    return inputs


@dataclass(eq=False)
class FineTuning:
    """Base class of the Hugging Face tasks: reads and writes the model's folder and adapters.

    lora_rank: rank of the LoRA adapters on frozen weights (arXiv:2106.09685); 0: no adapters, all
    weights are trained. lora_targets: layers that get adapters, such as q_proj,v_proj; all-linear:
    all but the head. new_head: the task adds a head, which LoRA trains in full and saves.
    """

    data: DataConfig
    model: str
    lora_rank: Annotated[int, Ge(0)] = field(default=0, kw_only=True)
    lora_targets: str = field(default="all-linear", kw_only=True)
    new_head: ClassVar[bool] = False
    processor: Any = field(init=False, repr=False)  # a tokenizer or image processor

    def __post_init__(self) -> None:
        if self.lora_rank == 0 and self.lora_targets != "all-linear":
            raise ValueError(
                f"lora_targets={self.lora_targets} needs lora_rank above 0; set it, or leave "
                "lora_targets out"
            )
        self.folder = model_folder(self.model)

    def build(self, kind: Any, tokenizer: Any = None, **options: Any) -> nn.Module:
        """`build`, with LoRA adapters. Raises ConfigError for a target that matches no layer."""
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
            # peft and transformers call each other's deprecated code; users can't change that.
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(model, config)

    def load(self, model: Any) -> None:
        load_pretrained(model, self.folder, fresh_head=self.new_head)

    def units(self, model: Any) -> list[nn.Module]:
        """The model's embedding and head, unless they are tied or it does not have both."""
        if self.lora_rank or self.new_head:  # with a new head, there may be no embedding
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
    """Turn the model's head into a LossHead, unless the model changes the head's logits.

    Raises ConfigError for such a model if `chunk` is a number.
    """
    if chunk == "off":
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and returns_head_logits(base):
        head.__class__ = LossHead
        head.chunk = chunk
    elif chunk != "auto":
        raise ConfigError(
            f"task.args.loss_chunk={chunk} needs a model whose logits are those of a linear head "
            f"without bias, which {type(base).__name__} is not; use auto or off"
        )


@torch.no_grad()
def returns_head_logits(model: Any) -> bool:
    """Whether the logits are the head's output, which some models cap or scale."""
    outputs: list[Any] = []
    head = model.get_output_embeddings()
    body = model.base_model
    # Try it on one token, with a body that returns a constant.
    hidden = Hidden(last_hidden_state=head.weight[None, :1])
    body.forward = lambda *args, **kwargs: hidden
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=head.weight.device)
        output = model(input_ids=ids, use_cache=False)
        return len(outputs) == 1 and output.logits is outputs[0]
    except Exception:  # any model's code may not take these inputs
        return False
    finally:
        hook.remove()
        del body.forward


class Hidden(BaseModelOutput):
    """A body's output that has only the hidden state; any other attribute is None."""

    def __getattr__(self, name: str) -> None:
        return None


def next_token_losses(
    model: Any, inputs: dict[str, Any], labels: Tensor, reduction: Reduction
) -> tuple[Tensor, Any]:
    """Returns (LossHead's losses for labels [B, T], the model's output).

    The last loss of each row is 0, because no token follows.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    head = getattr(model, "module", model).get_output_embeddings()  # DDP's module
    if not isinstance(head, LossHead):
        output = model(**inputs)
        return losses_of(output.logits, targets, reduction), output
    with head.losses_of(targets, reduction):
        output = model(**inputs)
    return output.logits, output
