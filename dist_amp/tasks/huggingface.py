"""What the tasks for Hugging Face models share: the model's folder, a model from its config, LoRA adapters."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, GenerationConfig

from dist_amp.errors import ConfigError, DataError, first_line
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_split, stay_local_without_network

MAIN_FILE = {AutoConfig: "config.json", AutoTokenizer: "tokenizer.json", AutoImageProcessor: "preprocessor_config.json"}
FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]


def model_folder(name: str) -> Path:
    """The local folder of a model: itself, or the hub's files in the cache. Errors: DataError if there is neither."""
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"task.args.model={name} is no folder; give a model's folder, or a name on the hub")
    stay_local_without_network()
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # the library raises many types
        why = first_line(error)
        if isinstance(error, LocalEntryNotFoundError):  # whose text is about options of the library
            why = "it is not in the cache, and the hub does not answer or is not asked (HF_HUB_OFFLINE)"
        raise DataError(
            f"task.args.model={name}: there is no such folder in {Path.cwd()}, and it could not be fetched from the "
            f"hub: {why}; check the name and the network, or give a local folder"
        ) from error


def opened(kind: Any, folder: Path, **options: Any) -> Any:
    """kind.from_pretrained(folder), for configs, tokenizers and processors. Errors: DataError if it can't be read."""
    try:
        return kind.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises many types, with many lines
        absent = kind in MAIN_FILE and not (folder / MAIN_FILE[kind]).is_file()
        why = f"it has no {MAIN_FILE[kind]}" if absent else first_line(error)
        raise DataError(
            f"{kind.__name__} can't be read from {folder}: {why}; give a folder that save_pretrained of the model and "
            "of the tokenizer or image processor wrote"
        ) from error


def open_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, with a padding token."""
    tokenizer = opened(AutoTokenizer, folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters on frozen weights; a rank of 0: none. Source: Hu et al. 2021, arXiv:2106.09685.

    targets: names of layers with commas between them, such as q_proj,v_proj; all-linear: every linear layer but the
    head. new_head: the head is trained whole, and saved with the adapters.
    """

    rank: int
    targets: str
    new_head: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora_rank={self.rank} must be at least 1, or 0 to train all weights")
        if self.rank == 0 and self.targets != "all-linear":
            raise ValueError(f"lora_targets={self.targets} needs lora_rank above 0; set it, or leave lora_targets out")

    def add_to(self, model: Any) -> nn.Module:
        """Errors: ConfigError for a target that matches no layer, with the names that there are."""
        names = [name for name, _ in model.named_modules()]
        wanted: Any = self.targets if self.targets == "all-linear" else self.targets.split(",")
        for target in () if self.targets == "all-linear" else wanted:
            if not any(f".{name}".endswith(f".{target}") for name in names):
                linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)}
                raise ConfigError(
                    f"task.args.lora_targets={self.targets}: {target!r} matches no layer of {type(model).__name__}; "
                    f"its linear layers are {', '.join(sorted(linear))}"
                )
        head = [
            name
            for name, child in model.named_children()
            if self.new_head and name != model.base_model_prefix and any(True for _ in child.parameters())
        ]
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=wanted, modules_to_save=head or None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about what peft and transformers call of one another
            return get_peft_model(model, config)


def build(kind: Any, folder: Path, lora: Lora, tokenizer: Any = None, **options: Any) -> nn.Module:
    """A model of `kind` (AutoModelFor...) from the folder's config: float32, or with LoRA in the files' own dtype.

    options: override the config. Errors: ConfigError for a kind that this architecture has not; DataError for a
    tokenizer with more tokens than the model.
    """
    config = opened(AutoConfig, folder, **options)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if tokenizer is not None and rows is not None:
        if (tokens := max(tokenizer.get_vocab().values()) + 1) > rows:  # more than len(tokenizer) if ids have gaps
            raise DataError(
                f"the tokenizer in {folder} has {tokens} tokens and the model's embedding {rows} rows; use the "
                "model's own tokenizer, or model.resize_token_embeddings and save both"
            )
        config.get_text_config().pad_token_id = tokenizer.pad_token_id  # by which classifiers find the last token
    try:
        model = kind.from_config(config, dtype=config.dtype if lora.rank else torch.float32)
    except ValueError as error:
        raise ConfigError(
            f"task.args.model: {folder} is a {config.model_type} model, for which there is no {kind.__name__}; use "
            f"another task or model ({first_line(error)})"
        ) from error
    if model.can_generate():
        with suppress(OSError):  # not every model has such a file
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return lora.add_to(model) if lora.rank else model


def labelled_rows(data: DataConfig, split: str) -> Any:
    """The rows that `data` names. Errors: DataError if they have no column "label"."""
    rows = load_split(data, split)
    if rows is not None and "label" not in rows.column_names:
        raise DataError(f"the rows have no column label; the columns are {', '.join(rows.column_names)}: rename one")
    return rows


def labelled(
    processor: Any, values: Sequence[Any], labels: Sequence[int], classes: int, length: int
) -> dict[str, Tensor]:
    """A batch of texts, of at most `length` tokens, or of images (PIL), with "labels" [B] int64."""
    for label in labels:
        if not 0 <= label < classes:
            raise ValueError(f"label {label} is not one of task.args.classes={classes}: 0 to {classes - 1}")
    if isinstance(values[0], str):
        inputs = processor(values, padding=True, truncation=True, max_length=length, return_tensors="pt")
    else:
        inputs = processor([value.convert("RGB") for value in values], return_tensors="pt")
    return {**inputs, "labels": torch.tensor(labels)}


def embedding_and_head(model: Any) -> list[nn.Module]:
    """The model's embedding and head, unless they are tied or it does not have both."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [] if None in ends or ends[0].weight is ends[1].weight else ends


def continued(model: Any, tokenizer: Any, prompt: str, tokens: int, chat: bool) -> str:
    """The prompt and the likeliest continuation, or the answer to it as a user's turn; every rank calls it."""
    register_fsdp_forward_method(model, "generate")
    if chat:
        turn = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    inputs = inputs.to(next(model.parameters()).device)
    ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    if chat:
        answer = ids[0, inputs["input_ids"].shape[1] :]
        return f"{prompt}\n{tokenizer.decode(answer, skip_special_tokens=True)}"
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def save_pretrained(model: Any, processor: Any, folder: str) -> None:
    """Write a model with its config, or adapters alone, and the tokenizer or image processor."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
