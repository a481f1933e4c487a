"""Fine-tune a model of images and text (Llava, Qwen-VL, ...) to answer, whole or with LoRA.

Rows: an image, and messages; or prompt and completion; or data.text_column, all of which is
learned. Of messages, the assistant's turns are learned. The image comes first where the text has no
place for it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig, Range
from dist_amp.sources.conversations import check_rows, common_prefix, encode_chat, text_of, turns
from dist_amp.sources.labelled_images import opened
from dist_amp.sources.load import load_split
from dist_amp.sources.token_shards import IGNORE_INDEX
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.tasks import huggingface
from dist_amp.tasks.pretrained import load_pretrained

Batch = dict[str, Any]


class ImageText:
    """Batch: what the processor makes of images and texts, labels [B, T], and two counts."""

    def __init__(
        self,
        data: DataConfig,
        model: str,
        length: Annotated[int, Range(low=2)] = 2048,
        image_column: str = "image",
        lora_rank: Annotated[int, Range(low=0)] = 0,
        lora_targets: str = "all-linear",
    ):
        self.data = data
        self.length = length
        self.image_column = image_column
        self.lora = huggingface.Lora(lora_rank, lora_targets)
        self.folder = huggingface.model_folder(model)
        self.processor = huggingface.opened(AutoProcessor, self.folder)
        if not hasattr(self.processor, "image_token"):
            raise ConfigError(
                f"task.args.model: {self.folder} has no processor with an image_token; use a model "
                "of images and text"
            )
        self.processor.tokenizer.padding_side = "right"

    def build_model(self) -> nn.Module:
        kind = AutoModelForImageTextToText
        return huggingface.build(kind, self.folder, self.lora, self.processor.tokenizer)

    def load(self, model: nn.Module) -> None:
        load_pretrained(model, self.folder)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [] if self.lora.rank else huggingface.embedding_and_head(model)

    def build_dataset(self, split: str) -> Any:
        rows = load_split(self.data, split, "messages", "prompt")
        if rows is None:
            return None
        columns = rows.column_names
        if self.image_column not in columns:
            raise DataError(
                f"task.args.image_column={self.image_column} does not exist; the columns are "
                f"{', '.join(columns)}"
            )
        tokenizer = of_transformers(self.processor.tokenizer)
        tokenizer = replace(tokenizer, chat=self.processor.chat_template)
        check_rows(rows, self.data.text_column, tokenizer)
        return huggingface.Converted(rows, self.sample_of)

    def sample_of(self, row: dict[str, Any]) -> tuple[Any, str, list[int]]:
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

    def encoded(self, row: dict[str, Any], image: Any) -> tuple[str, list[int], list[int]]:
        """(the whole text, its token ids, labels)."""
        chat = ChatWithImage(self, image)
        if "messages" in row:
            messages = with_place(turns(row, "messages"))
            return chat.text(messages), *encode_chat(messages, chat)
        column = "completion" if "completion" in row else self.data.text_column
        prompt = text_of(row, "prompt") if "completion" in row else ""
        answer = text_of(row, column)
        token = self.processor.image_token
        if token not in prompt + answer:
            prompt = token + prompt
        end = self.processor.tokenizer.eos_token or ""
        if answer.strip() and not answer.endswith(end):
            answer += end
        ids = chat.ids(prompt + answer)
        start = common_prefix(ids, chat.ids(prompt))
        return prompt + answer, ids, [IGNORE_INDEX] * start + ids[start:]

    def collate(self, samples: list[tuple[Any, str, list[int]]]) -> Batch:
        batch = self.processed([sample[:2] for sample in samples])
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

    def processed(self, pairs: list[Any]) -> Batch:
        """Of (image, text) pairs, padded on the right. A beginning of a chat may have no image."""
        images = [[image] for image, text in pairs if self.processor.image_token in text]
        texts = [text for _, text in pairs]
        options = {"padding": True, "return_tensors": "pt"}
        return dict(self.processor(images=images or None, text=texts, **options))

    def weight(self, batch: Batch) -> int:
        return batch["counted"]  # type: ignore[no-any-return]

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"]  # type: ignore[no-any-return]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(*next_tokens(model, batch), reduction="sum")

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, labels = next_tokens(model, batch)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {
            "loss": loss,
            "accuracy": logits.argmax(1).eq(labels).sum(),
        }

    def export(self, model: nn.Module, folder: str) -> None:
        model.save_pretrained(folder)  # type: ignore[operator]
        self.processor.save_pretrained(folder)


def next_tokens(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(logits [B (T - 1), vocabulary] float32, labels [B (T - 1)]) of all tokens but each first."""
    others = ("labels", "tokens", "counted")
    inputs = {name: value for name, value in batch.items() if name not in others}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return logits.flatten(0, 1), batch["labels"][:, 1:].flatten()


class ChatWithImage:
    """What `encode_chat` asks of a tokenizer: chats about one image as token ids."""

    chat_template = ""  # marks of what is generated do not survive the image's expansion

    def __init__(self, task: ImageText, image: Any):
        self.task = task
        self.image = image
        self.name_or_path = task.folder

    def text(self, messages: list[Any], add_generation_prompt: bool = False) -> str:
        render = self.task.processor.apply_chat_template
        return render(messages, add_generation_prompt=add_generation_prompt)  # type: ignore[no-any-return]

    def ids(self, text: str) -> list[int]:
        return self.task.processed([(self.image, text)])["input_ids"][0].tolist()  # type: ignore[no-any-return]

    def apply_chat_template(
        self,
        messages: list[Any],
        return_dict: bool,
        add_generation_prompt: bool = False,
    ) -> dict[str, list[int]]:
        return {"input_ids": self.ids(self.text(messages, add_generation_prompt))}


def with_place(messages: list[Any]) -> list[Any]:
    """Messages as lists of parts, with a place for the image in the user's first turn."""
    parted = []
    for one in messages:
        parts = one["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}] if parts else []
        # Rows of a table have every key in every part.
        parts = [{key: part[key] for key in part if part[key] is not None} for part in parts]
        parted.append({**one, "content": parts})
    if not any(part["type"] == "image" for one in parted for part in one["content"]):
        first = next((one for one in parted if one["role"] == "user"), None)
        if first is None:
            raise DataError("the chat has no user's turn for the image; add one")
        first["content"] = [{"type": "image"}, *first["content"]]
    return parted
