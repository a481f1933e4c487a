"""Stand-in until the real one is merged: text in memory."""

from typing import Any

import numpy
import torch
from torch import Tensor

from dist_amp.errors import DataError
from dist_amp.settings import DataConfig
from dist_amp.sources.load import load_split
from dist_amp.sources.tokenizer import Tokenizer


def token_documents(data: DataConfig, split: str, tokenizer: Tokenizer, rows: Any = None) -> Any:
    if rows is None:
        rows = load_split(data, split)
    return None if rows is None else Documents(rows[data.text_column], tokenizer)


class Documents:
    """Token dataset in memory."""

    def __init__(self, texts: Any, tokenizer: Tokenizer):
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"data.text_column holds {type(text).__name__}, not text; name a column of text")
        end = [] if tokenizer.end is None else [tokenizer.end]
        self.ids = [torch.tensor(tokenizer.encode(text) + end) for text in texts]
        self.lengths = numpy.array([len(one) for one in self.ids])
        self.vocabulary = tokenizer.vocabulary
        self.fingerprint = str(hash(tuple(self.lengths.tolist())))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.pieces([(index, 0, len(self.ids[index]))])[0]

    def pieces(self, pieces: list[tuple[int, int, int]]) -> list[dict[str, Tensor]]:
        samples = []
        for document, start, stop in pieces:
            ids = self.ids[document][start:stop].clone()
            labels = ids.clone()
            if start == 0:
                labels[:1] = -100
            samples.append({"input_ids": ids, "labels": labels})
        return samples
