"""A GPT, by default on the bytes of Python's standard library, which every machine has.

To train this model on your text, set `[data]`. To train a model of your own, copy this file.

Docs: docs/data.md
"""

import logging
import math
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from dist_amp.settings import Count, DataConfig
from dist_amp.sources.load import pick_split
from dist_amp.sources.mixture import losses_by_source, mixed, tables_of
from dist_amp.sources.packing import Packing, TokenShares
from dist_amp.sources.tokenizer import check_vocabulary, open_tokenizer
from dist_amp.sources.tokens import token_documents
from dist_amp.tasks.loss_head import LossHead
from dist_amp.tasks.packed_attention import Documents, PackedAttention, attend, document_bounds

log = logging.getLogger(__name__)
Batch = dict[str, Any]


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Source: Su et al. 2021, arXiv:2104.09864."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        # Keeps the initial variance of the residual stream, to which 2 * layers branches add.
        # Source: Radford et al. 2019, "Language models are unsupervised multitask learners".
        nn.init.normal_(self.qkv.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        y, mask = attend((q, k, v), documents)  # y: None unless the packed kernel ran
        if y is None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a GELU MLP of four times the width."""

    def __init__(self, width: int, heads: int, layers: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, layers)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, documents)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """tokens [B, T] int64 -> logits [B, T, vocabulary]; T is at most `context`.

    loss: if given, targets [B, T] int64 and a reduction: returns `LossHead`'s losses, not logits.
    documents: those of packed rows; a token attends only to its own document.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, vocabulary: int, context: int, width: int, layers: int, heads: int, tied: bool
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = LossHead(width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.head.weight, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, *loss: Any, documents: Documents | None = None) -> Tensor:
        cos = self.cos[: tokens.shape[1]]
        sin = self.sin[: tokens.shape[1]]
        if documents is not None:
            cos = self.cos[documents.positions].unsqueeze(1)  # [B, 1, T, ...], for all heads
            sin = self.sin[documents.positions].unsqueeze(1)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, documents)
        return self.head(self.norm(x), *loss)  # type: ignore[no-any-return]


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angle: both [context, head_width / 2] float32."""
    frequency = 10_000 ** -(torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(context), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of the last dimension by its angle; keeps the dtype."""
    a, b = x.chunk(2, dim=-1)
    cos = cos.to(x.dtype)
    sin = sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@dataclass(eq=False)
class CausalLM:
    """Predict the next token. Batch: input_ids, labels [B, context + 1] int64; counts; if packed
    also position_ids and bounds: see `Packing.collate` and `document_bounds`.
    """

    data: DataConfig
    context: Count = 128
    width: Count = 128
    layers: Count = 2
    heads: Count = 4
    vocabulary: Annotated[int, Ge(256)] = 256
    tied: bool = True
    loss_chunk: Count | Literal["auto", "off"] = "auto"
    packed_attention: PackedAttention = "auto"
    prompt: str = "def "
    sample_bytes: Annotated[int, Ge(0)] = 400

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width={self.width} must be a multiple of 2 x heads={self.heads}, for rotary "
                "positions"
            )
        name = "bytes" if self.data.tokenizer == "auto" else self.data.tokenizer
        self.tokenizer = open_tokenizer(name)
        check_vocabulary(self.tokenizer, self.vocabulary)
        self.packing = Packing.of(self.data, self.context + 1, auto="cut")
        self.source_names = list(tables_of(self.data))
        self.shares = TokenShares(self.source_names)

    def build_model(self) -> nn.Module:
        shape = (self.vocabulary, self.context, self.width, self.layers, self.heads)
        model = GPT(*shape, self.tied)
        model.head.chunk = self.loss_chunk
        return model

    def build_dataset(self, split: str) -> Any:
        def rows_of(source: DataConfig) -> Any:
            text = None
            if source.name == "auto" and source.path == "off":
                text = python_source(source, split)
            documents = token_documents(source, split, self.tokenizer, text)
            return self.packing.rows(documents, split)

        return mixed(self.data, split, rows_of)

    def collate(self, samples: list[Batch]) -> Batch:
        batch = self.packing.collate(samples)
        if "position_ids" in batch:
            batch["bounds"] = document_bounds(batch["position_ids"][:, :-1])
        return batch

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)  # type: ignore[arg-type]

    def units(self, model: nn.Module) -> list[nn.Module]:
        if self.tied:
            return []
        return [model.embedding, model.head]  # type: ignore[list-item]

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses(model, batch, "sum")

    def losses(self, model: nn.Module, batch: Batch, reduction: str) -> Tensor:
        packed = {}
        if "position_ids" in batch:
            positions = batch["position_ids"][:, :-1]
            packed["documents"] = Documents.of(positions, batch["bounds"], self.packed_attention)
        tokens = batch["input_ids"][:, :-1]
        return model(tokens, batch["labels"][:, 1:], reduction, **packed)  # type: ignore[no-any-return]

    def weight(self, batch: Batch) -> int:
        return batch["counted"]  # type: ignore[no-any-return]

    def tokens(self, batch: Batch) -> int:
        return self.shares.count(batch) - len(batch["labels"])  # a row's first is not a target

    def train_metrics(self, run: Any, report: Any) -> Batch:
        return self.shares.read(run.world)

    def flops_per_item(self, model: nn.Module) -> float:
        """FLOPs of one sample: 2 per multiply-add, x 3: backward takes twice the forward's.

        Attention counts in full, T x T. For a kernel that skips the masked half, the MFU is thus
        overestimated. Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        weights = self.layers * 12 * self.width**2  # qkv 3, out 1, up 4, down 4
        weights += self.vocabulary * self.width  # the head; the embedding is a lookup
        # Per token: the attention scores, and the weighted sum of values.
        attention = self.layers * 2 * self.context * self.width
        return 3 * 2 * self.context * (weights + attention)

    def metrics(self, model: nn.Module, batch: Batch) -> Batch:
        values: Batch = {}
        if self.source_names:
            targets = batch["labels"][:, 1:]
            losses = self.losses(model, batch, "hits")[0].view_as(targets)
            source_ids = batch["source_ids"][:, 1:]
            values |= losses_by_source(losses, targets, source_ids, self.source_names)
            values["loss"] = losses.sum()
        else:
            values["loss"] = self.loss_sum(model, batch)
        if self.tokenizer.name == "bytes":
            values["bits_per_byte"] = values["loss"] / math.log(2)
        return values

    def sample(self, model: nn.Module) -> str:
        """The prompt with its continuation, the same on every rank."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        ids = self.tokenizer.encode(self.prompt)
        for _ in range(self.sample_bytes):
            window = ids[-self.context :]
            # Padded, because oneDNN keeps 3 MiB of kernels for each new length in bf16 (measured).
            tokens = torch.tensor([window + [0] * (self.context - len(window))], device=device)
            logits = model(tokens)[0, len(window) - 1, : self.tokenizer.vocabulary]
            probabilities = torch.softmax(logits.float().cpu() / 0.7, dim=-1)  # temperature 0.7
            token = torch.multinomial(probabilities, 1, generator=generator)
            ids.append(int(token))
        return self.tokenizer.decode(ids)


def python_source(config: DataConfig, split: str) -> Any:
    """Documents: the files of the standard library's source, about 11 MB."""
    import datasets

    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - excluded  # listing installed packages would take seconds
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    if split == "train":
        version = platform.python_version()
        log.info("data: %d files of the standard library of Python %s", len(files), version)
    names = list(map(str, files))
    documents = datasets.load_dataset("text", data_files=names, sample_by="document")
    return pick_split(documents, config, split)
