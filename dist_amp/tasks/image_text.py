"""Fine-tune a model of images and text (Llava, Qwen-VL, ...) to answer, whole or with LoRA.

Rows: an image, and messages; or prompt and completion; or data.text_column, all of which is
learned. Of messages, the assistant's turns are learned. The image comes first where the text has no
place for it.

Docs: docs/huggingface.md
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import Count
from dist_amp.sources.conversations import (
    LAYOUTS,
    Row,
    chat_of,
    check_rows,
    common_prefix,
    encode_chat,
    layout,
    text_of,
)
from dist_amp.sources.labelled_images import opened
from dist_amp.sources.load import Converted, load_split
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.tasks import huggingface
from dist_amp.tasks.loss_head import Reduction

Batch = Row


@dataclass(eq=False)
class ImageText(huggingface.FineTuning):
    """Batch: what the processor makes of images and texts, labels [B, T], and two counts."""

    length: huggingface.Length = 2048
    pad_to_multiple_of: Count = 128
    image_column: str = "image"
    loss_chunk: Count | Literal["auto", "off"] = "auto"

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
        rows = load_split(self.data, split, *LAYOUTS)
        if rows is None:
            return None
        if self.image_column not in rows.column_names:
            raise DataError(
                f"task.args.image_column={self.image_column} does not exist; the columns are "
                f"{', '.join(rows.column_names)}"
            )
        tokenizer = of_transformers(self.processor.tokenizer)
        tokenizer = replace(tokenizer, chat=self.processor.chat_template)
        check_rows(rows, split, self.data.text_column, tokenizer)
        return Converted(rows, self.sample_of)

    def sample_of(self, row: Row) -> tuple[Any, str, list[int]]:
        """(image, text, labels). Errors: DataError for what can't be read or learned."""
        image = self.image_of(row[self.image_column])
        text, ids, labels = self.encoded(row, image)
        length = self.length
        token = self.processor.image_token_id
        if ids[:length].count(token) < ids.count(token):
            raise DataError(
                f"the image takes {ids.count(token)} tokens, more than task.args.length={length} "
                "leaves it; use a greater length, or smaller images"
            )
        if all(label == IGNORE_INDEX for label in labels[1:length]):
            raise DataError(
                f"within task.args.length={length} of its {len(ids)} tokens the sample has no "
                "answer to learn; use a greater length, or remove it"
            )
        return image, text, labels

    def image_of(self, value: Any) -> Any:
        """An RGB picture; of a path, relative to the data's folder."""
        if isinstance(value, str):
            data = Path(self.data.path)
            path = (data.parent if data.suffix or "*" in data.name else data) / value
            try:
                value = path.read_bytes()
            except OSError as error:
                raise DataError(
                    f"the image {path} can't be read ({error.strerror}); correct the column "
                    f"{self.image_column}"
                ) from error
        return opened(value).convert("RGB")

    def encoded(self, row: Row, image: Any) -> tuple[str, list[int], list[int]]:
        """(the whole text, its token ids, labels)."""
        form = layout(list(row), self.data.text_column)
        chat = ChatWithImage(self, image)
        if form in ("messages", "conversations", "instruction"):
            row = {**row, form: with_parts(row[form])}
            messages, learned_from = chat_of(row, self.data.text_column, chat)
            self.place_image(messages)
            tokens = encode_chat(messages, chat, learned_from, row.get("tools"))
            return chat.apply_chat_template(messages), *tokens
        column = "completion" if "completion" in row else self.data.text_column
        prompt = text_of(row, "prompt") if "completion" in row else ""
        answer = text_of(row, column)
        token = self.processor.image_token
        if token not in prompt + answer:
            prompt = token + prompt
        end = self.processor.tokenizer.eos_token or ""
        if answer.strip() and not answer.endswith(end):
            answer += end
        ids = chat(prompt + answer)["input_ids"]
        start = common_prefix(ids, chat(prompt)["input_ids"])
        return prompt + answer, ids, [IGNORE_INDEX] * start + ids[start:]

    def place_image(self, messages: list[Row]) -> None:
        """Put the image first in the first turn of the user, if nothing has a place for it."""
        token = self.processor.image_token
        if any("image_parts" in one or token in (one["content"] or "") for one in messages):
            return
        for one in messages:
            if one["role"] == "user":
                one["image_parts"] = [{"type": "image"}, *text_parts(one["content"])]
                return
        raise DataError("the chat has no user's turn for the image; add one")

    def collate(self, samples: list[tuple[Any, str, list[int]]]) -> Batch:
        batch = self.processed([sample[:2] for sample in samples], self.pad_to_multiple_of)
        labels = torch.full_like(batch["input_ids"], IGNORE_INDEX)
        for row, (_, _, learned) in enumerate(samples):
            labels[row, : len(learned)] = torch.tensor(learned)
        batch["labels"] = labels
        for name, value in batch.items():
            if value.shape == labels.shape:
                batch[name] = value[:, : self.length]
        counted = int((batch["labels"][:, 1:] != IGNORE_INDEX).sum())
        return {
            **batch,
            "tokens": int(batch["attention_mask"].sum()),
            "counted": counted,
        }

    def processed(self, pairs: list[Any], multiple: int = 1) -> Batch:
        """Of (image, text) pairs, padded on the right to a multiple of so many tokens.

        A beginning of a chat may have no image.
        """
        images = [[image] for image, text in pairs if self.processor.image_token in text]
        texts = [text for _, text in pairs]
        options: Row = {"padding": True, "pad_to_multiple_of": multiple, "return_tensors": "pt"}
        if (start := self.processor.tokenizer.bos_token) and texts[0].startswith(start):
            options["add_special_tokens"] = False  # the chat template writes them
        return dict(self.processor(images=images or None, text=texts, **options))

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"]  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses(model, batch, "sum")

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        losses, hits = self.losses(model, batch, "hits")
        return {"loss": losses.sum(), "accuracy": hits.sum()}

    def losses(self, model: nn.Module, batch: Batch, reduction: Reduction) -> Tensor:
        """See LossHead."""
        others = ("labels", "tokens", "counted")
        inputs = {name: value for name, value in batch.items() if name not in others}
        inputs["use_cache"] = False
        return huggingface.next_token_losses(model, inputs, batch["labels"], reduction)[0]


class ChatWithImage:
    """What `encode_chat` asks of a tokenizer, for a chat about one image."""

    chat_template = ""  # marks of what is generated do not survive the image's expansion

    def __init__(self, task: ImageText, image: Any):
        self.task = task
        self.image = image
        self.name_or_path = task.folder

    def apply_chat_template(
        self,
        messages: list[Any],
        tools: None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        """The chat as text. `tools` are refused before, since this template names none."""
        parted = []
        for one in messages:
            parts = text_parts(one["content"])
            if one["role"] == "user":
                parts = one.get("image_parts", parts)
            parted.append({**one, "content": parts})
        render = self.task.processor.apply_chat_template
        return render(parted, add_generation_prompt=add_generation_prompt)  # type: ignore[no-any-return]

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """The token ids of the text and the image; options: of a tokenizer, without effect."""
        return {"input_ids": self.task.processed([(self.image, text)])["input_ids"][0].tolist()}


def with_parts(messages: Any) -> Any:
    """Messages that have an image keep their content apart: `encode_chat` reads text alone."""
    if not isinstance(messages, list):
        return messages
    taken = []
    for one in messages:
        if isinstance(one, dict):
            content = one.get("content", one.get("value"))  # of ShareGPT
            if isinstance(content, list) and any(map(is_image, content)):
                role = one.get("role", one.get("from"))
                one = {"role": role, "content": "", "image_parts": content}
        taken.append(one)
    return taken


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image"


def text_parts(text: str | None) -> list[Row]:
    if not text:
        return []
    return [{"type": "text", "text": text}]
