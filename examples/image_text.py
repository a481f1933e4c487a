"""Fine-tune a model of images and text (Llava, Qwen-VL, ...) to answer, whole or with LoRA.

python -m dist_amp.train --task.target examples/image_text.py:ImageText --data.path rows.jsonl \
    --task.args.model llava-hf/llava-1.5-7b-hf --task.args.lora_rank 16 \
    --train.micro_batch_size 4 --optim.lr 2e-4

A row has an image, or its path from the data's folder; and messages, of which the assistant's turns
are learned, or prompt and completion. The image comes first where the text has no place for it.
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
    """Batch: what the processor makes of images and texts, labels [B, T], and two counts."""

    length: huggingface.Length = 2048
    pad_to_multiple_of: int = 128
    image_column: str = "image"
    loss_chunk: Chunk = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.processor = huggingface.opened(AutoProcessor, self.folder)
        if not hasattr(self.processor, "image_token"):
            raise ConfigError(
                f"task.args.model: {self.folder} has no processor with an image_token; use a model "
                "of images and text"
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
            raise DataError(f"the rows have no column {missing.pop()}; the columns are {there}")
        if form == "messages" and not self.processor.chat_template:
            raise DataError("the processor has no chat template; use prompt and completion")
        return Converted(rows, self.sample_of)

    def sample_of(self, row: Batch) -> tuple[Any, str, list[int]]:
        """(image, text, labels). Errors: DataError for what can't be read or learned."""
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
                f"the image takes {ids.count(token)} tokens, more than task.args.length="
                f"{self.length} leaves it; use a greater length, or smaller images"
            )
        if all(label == IGNORE_INDEX for label in labels[1 : self.length]):
            raise DataError(
                f"within task.args.length={self.length} of its {len(ids)} tokens the sample has no "
                "answer to learn; use a greater length, or remove it"
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
        """(text, the one answer in it: the text before and after)."""
        prompt, answer = row["prompt"], row["completion"]
        if not (isinstance(prompt, str) and isinstance(answer, str) and answer.strip()):
            raise DataError("prompt and completion must be texts, and the completion not empty")
        if self.processor.image_token not in prompt + answer:
            prompt = self.processor.image_token + prompt
        end = self.processor.tokenizer.eos_token or ""
        text = prompt + answer.removesuffix(end) + end
        return text, [(prompt, text)]

    def chat(self, row: Batch) -> tuple[str, list[tuple[str, str]]]:
        """(text, the assistant's answers in it: the texts before and after each)."""
        messages = []
        for message in row["messages"]:
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            messages.append({"role": message["role"], "content": content})
        if not any(self.is_place(part) for message in messages for part in message["content"]):
            turn = next((m for m in messages if m["role"] == "user"), None)
            if turn is None:
                raise DataError("the chat has no user's turn for the image; add one")
            turn["content"] = [{"type": "image"}, *turn["content"]]
        render = self.processor.apply_chat_template
        answers = [
            (render(messages[:at], add_generation_prompt=True), render(messages[: at + 1]))
            for at, message in enumerate(messages)
            if at and message["role"] == "assistant"
        ]
        text = render(messages)
        # Some templates render an earlier answer in another way later on: it is not learned.
        return text, [(before, after) for before, after in answers if text.startswith(before)]

    def is_place(self, part: Batch) -> bool:
        return part["type"] == "image" or self.processor.image_token in (part.get("text") or "")

    def ids_of(self, image: Any, text: str) -> list[int]:
        return self.processed([(image, text)])["input_ids"][0].tolist()

    def processed(self, pairs: list[tuple[Any, str]], multiple: int = 1) -> Batch:
        """(image, text) pairs, padded on the right; a chat's beginning may have no image."""
        images = [[image] for image, text in pairs if self.processor.image_token in text]
        texts = [text for _, text in pairs]
        options: Batch = {"padding": True, "pad_to_multiple_of": multiple, "return_tensors": "pt"}
        if (start := self.processor.tokenizer.bos_token) and texts[0].startswith(start):
            options["add_special_tokens"] = False  # the chat template writes them
        return dict(self.processor(images=images or None, text=texts, **options))

    def collate(self, samples: list[tuple[Any, str, list[int]]]) -> Batch:
        batch = self.processed([sample[:2] for sample in samples], self.pad_to_multiple_of)
        labels = torch.full_like(batch["input_ids"], IGNORE_INDEX)
        for row, (_, _, learned) in enumerate(samples):
            labels[row, : len(learned)] = torch.tensor(learned)
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
