"""Fine-tune a vision-language model (Llava, Qwen-VL, ...), in full or with LoRA.

python -m dist_amp.train --task.target examples/image_text.py:ImageText --data.path rows.jsonl \
    --task.args.model llava-hf/llava-1.5-7b-hf --task.args.lora_rank 16 \
    --train.micro_batch_size 4 --optim.lr 2e-4

A row has an image, or its path in the data's folder; and messages, with a loss on the assistant's
turns, or prompt and completion. Without an image token in the text, the image comes first.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from dist_amp.errors import ConfigError, DataError
from dist_amp.sources.conversations import common_prefix
from dist_amp.sources.labelled_images import opened
from dist_amp.sources.load import Converted, load_split
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.tasks import huggingface
from dist_amp.tasks.loss_head import Chunk, Reduction

Batch = dict[str, Any]
NOT_INPUTS = ("labels", "tokens", "counted")


@dataclass(eq=False)
class ImageText(huggingface.FineTuning):
    """Batch: the processor's tensors, labels [B, T], and the counts of tokens and of targets."""

    length: huggingface.Length = 2048
    pad_to_multiple_of: int = 128
    image_column: str = "image"
    loss_chunk: Chunk = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.processor = huggingface.open_pretrained(AutoProcessor, self.folder)
        if not hasattr(self.processor, "image_token"):
            raise ConfigError(
                f"task.args.model: {self.folder} has no processor with an image_token; use a "
                "vision-language model"
            )
        self.processor.tokenizer.padding_side = "right"

    def build_model(self) -> nn.Module:
        model = self.build(AutoModelForImageTextToText, self.processor.tokenizer)
        huggingface.make_loss_head(model, self.loss_chunk)
        return model

    def build_dataset(self, split: str) -> Any:
        rows = load_split(self.data, split, "messages", "completion")
        if rows is None:
            return None
        form = "messages" if "messages" in rows.column_names else "prompt"
        if missing := {self.image_column, form} - {*rows.column_names}:
            there = ", ".join(rows.column_names)
            raise DataError(f"the rows have no column {missing.pop()}; their columns are {there}")
        if form == "messages" and not self.processor.chat_template:
            raise DataError("the processor has no chat template; use prompt and completion")
        return Converted(rows, self.sample_of)

    def sample_of(self, row: Batch) -> tuple[Any, str, list[int]]:
        """(image, text, labels). Raises DataError for a row that can't be read or trained on."""
        image = self.image_of(row[self.image_column])
        text, answers = self.chat(row) if "messages" in row else self.completion(row)
        ids = self.ids_of(image, text)
        labels = [IGNORE_INDEX] * len(ids)
        for before, after in answers:
            start = common_prefix(ids, self.ids_of(image, before))
            end = common_prefix(ids, self.ids_of(image, after))
            labels[start:end] = ids[start:end]
        token = self.processor.image_token_id
        if token in ids[self.length :]:
            raise DataError(
                f"the image takes {ids.count(token)} tokens and does not fit into task.args.length="
                f"{self.length}; use a greater length, or smaller images"
            )
        if all(label == IGNORE_INDEX for label in labels[1 : self.length]):
            raise DataError(
                f"the first task.args.length={self.length} of the sample's {len(ids)} tokens hold "
                "no answer to train on; use a greater length, or remove the sample"
            )
        return image, text, labels

    def image_of(self, value: Any) -> Any:
        if isinstance(value, str):
            data = Path(self.data.path)
            folder = data.parent if data.suffix or "*" in data.name else data
            try:
                value = (folder / value).read_bytes()
            except OSError as error:
                raise DataError(f"the image {folder / value} can't be read: {error}") from error
        return opened(value).convert("RGB")

    def completion(self, row: Batch) -> tuple[str, list[tuple[str, str]]]:
        """(text, [(text before the answer, text up to its end)])."""
        prompt, answer = row["prompt"], row["completion"]
        if not (isinstance(prompt, str) and isinstance(answer, str) and answer.strip()):
            raise DataError("prompt and completion must be texts, and the completion not empty")
        if self.processor.image_token not in prompt + answer:
            prompt = self.processor.image_token + prompt
        end = self.processor.tokenizer.eos_token or ""
        text = prompt + answer.removesuffix(end) + end
        return text, [(prompt, text)]

    def chat(self, row: Batch) -> tuple[str, list[tuple[str, str]]]:
        """(text, [(text before an assistant's turn, text up to its end), ...])."""
        messages = []
        for message in row["messages"]:
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            messages.append({"role": message["role"], "content": content})
        if not any(self.is_image(part) for message in messages for part in message["content"]):
            turn = next((m for m in messages if m["role"] == "user"), None)
            if turn is None:
                raise DataError("the chat has no user's turn for the image; add one")
            turn["content"] = [{"type": "image"}, *turn["content"]]
        render = self.processor.apply_chat_template
        answers = [
            (render(messages[:index], add_generation_prompt=True), render(messages[: index + 1]))
            for index, message in enumerate(messages)
            if index and message["role"] == "assistant"
        ]
        text = render(messages)
        # Some templates change an answer when more turns follow: such answers get no labels.
        return text, [(before, after) for before, after in answers if text.startswith(before)]

    def is_image(self, part: Batch) -> bool:
        return part["type"] == "image" or self.processor.image_token in (part.get("text") or "")

    def ids_of(self, image: Any, text: str) -> list[int]:
        return self.processed([(image, text)])["input_ids"][0].tolist()

    def processed(self, pairs: list[tuple[Any, str]], multiple: int = 1) -> Batch:
        """The model's inputs for (image, text) pairs. A text without an image token gets none."""
        images = [[image] for image, text in pairs if self.processor.image_token in text]
        texts = [text for _, text in pairs]
        options: Batch = {"padding": True, "pad_to_multiple_of": multiple, "return_tensors": "pt"}
        if (start := self.processor.tokenizer.bos_token) and texts[0].startswith(start):
            options["add_special_tokens"] = False  # the chat template has added them
        return dict(self.processor(images=images or None, text=texts, **options))

    def collate(self, samples: list[tuple[Any, str, list[int]]]) -> Batch:
        batch = self.processed([sample[:2] for sample in samples], self.pad_to_multiple_of)
        labels = torch.full_like(batch["input_ids"], IGNORE_INDEX)
        for row, (_, _, row_labels) in enumerate(samples):
            labels[row, : len(row_labels)] = torch.tensor(row_labels)
        batch["labels"] = labels
        for name, value in batch.items():
            if value.shape == labels.shape:
                batch[name] = value[:, : self.length]
        batch["tokens"] = int(batch["attention_mask"].sum())
        batch["counted"] = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        return batch

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses(model, batch, "sum")

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        losses, hits = self.losses(model, batch, "hits")
        return {"loss": losses.sum(), "accuracy": hits.sum()}

    def losses(self, model: nn.Module, batch: Batch, reduction: Reduction) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name not in NOT_INPUTS}
        inputs["use_cache"] = False
        return huggingface.next_token_losses(model, inputs, batch["labels"], reduction)[0]
