"""Documents in rows: which tokens are where, what counts, how full rows are, and bad inputs."""

from itertools import pairwise

import numpy
import pytest
import torch
from tiny import make_run, take_steps

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.settings import DataConfig
from dist_amp.sources.packing import (
    IGNORE_INDEX,
    PackedRows,
    Packing,
    TokenShares,
    best_fit,
    pieces_of,
)
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents
from dist_amp.supervise.callbacks import train_metrics
from dist_amp.world import World


class Documents:
    """A token dataset: all tokens count but each document's first, and those in `masked`."""

    vocabulary = 256
    fingerprint = "documents"

    def __init__(self, ids, masked=()):
        self.ids = [torch.as_tensor(one, dtype=torch.int64) for one in ids]
        self.lengths = numpy.array([len(one) for one in self.ids])
        self.masked = set(masked)
        self.firsts = numpy.ones(len(ids), int)

    @classmethod
    def random(cls, count, low, high, vocabulary):
        """`count` documents of low to high tokens."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
        return cls(
            [torch.randint(1, vocabulary, (length,), generator=generator) for length in lengths]
        )

    @classmethod
    def numbered(cls, *lengths):
        """Each token is its number in the joined stream."""
        return cls(torch.arange(sum(lengths)).split(list(lengths)))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = (
            torch.full_like(self.ids[index], IGNORE_INDEX)
            if index in self.masked
            else self.ids[index].clone()
        )
        labels[:1] = IGNORE_INDEX
        return {"input_ids": self.ids[index], "labels": labels}

    def pieces(self, pieces):
        return [
            {name: x[start:stop] for name, x in self[number].items()}
            for number, start, stop in pieces
        ]


def rows_of(documents, length, pack="best_fit", long_documents="split"):
    rows = PackedRows(documents, Packing(length, pack, long_documents))
    return rows, list(rows)


def documents_in(row):
    """The token lists of a packed row's documents."""
    begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
    return [
        row["input_ids"][a:b].tolist() for a, b in zip(begins, [*begins[1:], None], strict=True)
    ]


# Best fit.


def test_every_document_is_whole_in_one_row_once():
    documents = Documents.random(500, 2, 30, 256)
    rows, samples = rows_of(documents, 30)
    found = [document for sample in samples for document in documents_in(sample)]
    assert sorted(found) == sorted(one.tolist() for one in documents.ids)
    assert all(len(sample["input_ids"]) <= 30 for sample in samples)
    assert rows.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]


def test_the_first_token_of_each_document_does_not_count_and_all_others_do():
    _, samples = rows_of(Documents.random(100, 2, 30, 256), 30)
    for sample in samples:
        first = sample["position_ids"] == 0
        assert torch.equal(sample["labels"] == IGNORE_INDEX, first)
        assert torch.equal(sample["labels"][~first], sample["input_ids"][~first])


def plain_best_fit(sizes, length):
    """As the paper has it, piece by piece: the tokens left in each row, sorted."""
    left = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in left if room >= size]
        if fitting:
            left[left.index(min(fitting))] -= size
        else:
            left.append(length - size)
    return sorted(left)


def test_rows_are_as_full_as_those_of_best_fit_piece_by_piece():
    for seed in range(40):
        random = numpy.random.default_rng(seed)
        length = int(random.integers(2, 60))
        sizes = random.integers(1, length + 1, random.integers(1, 150))
        fill = numpy.bincount(best_fit(sizes, length), weights=sizes).astype(int)
        assert sorted((length - fill).tolist()) == plain_best_fit(sizes.tolist(), length)


def test_rows_with_several_documents_are_not_all_at_the_end():
    rows, _ = rows_of(Documents.numbered(*[90] * 100, *[10] * 100), 90)
    packed = [number for number in range(len(rows)) if len(rows.pieces(number)) > 1]
    assert packed[0] < len(rows) / 2


def test_rows_of_usual_documents_are_nearly_full():
    """Log-normal lengths, as of web pages: under 0.1 % padding, where one document per row has far
    more.
    """
    lengths = numpy.exp(numpy.random.default_rng(0).normal(6, 1.2, 20_000)).astype(int) + 2
    documents = Documents([])
    documents.lengths = lengths
    packed = PackedRows(documents, Packing(2048, "best_fit", "split"))
    padded = PackedRows(documents, Packing(2048, "off", "split"))
    assert packed.padding_share < 0.001
    assert padded.padding_share > 0.5


def test_a_rows_documents_are_no_neighbours_in_the_source():
    documents = Documents([[number // 256, number % 256, 0] for number in range(3000)])
    _, samples = rows_of(documents, 12)
    numbers = [[256 * a + b for a, b, _ in documents_in(sample)] for sample in samples]
    distances = [abs(a - b) for row in numbers for a, b in pairwise(row)]
    # Two places drawn from 3,000 are 1,000 apart on average.
    assert 900 < sum(distances) / len(distances) < 1100


def test_rows_are_the_same_at_every_start_whatever_the_runs_seed():
    documents = Documents.random(300, 2, 30, 256)
    (one, first), (other, second) = (rows_of(documents, 30) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, second, strict=True)
    )


def test_the_fingerprint_tells_documents_and_settings_apart():
    documents, other = Documents.numbered(9, 9), Documents.numbered(9, 9)
    other.fingerprint = "other"
    settings = [
        Packing(8, "best_fit", "split"),
        Packing(9, "best_fit", "split"),
        Packing(8, "cut", "split"),
    ]
    settings.append(Packing(8, "best_fit", "truncate"))
    prints = [PackedRows(documents, packing).fingerprint for packing in settings]
    assert len({*prints, PackedRows(other, settings[0]).fingerprint}) == 5


# Long documents.


def test_a_split_document_counts_each_token_once():
    _, samples = rows_of(Documents.numbered(21), 8)
    counted = torch.cat([sample["labels"][sample["labels"] != IGNORE_INDEX] for sample in samples])
    assert sorted(counted.tolist()) == list(range(1, 21))
    assert sorted(sample["input_ids"][0].item() for sample in samples) == [0, 7, 14], (
        "with the token before it"
    )


def test_a_truncated_document_is_its_beginning():
    _, (sample,) = rows_of(Documents.numbered(21), 8, long_documents="truncate")
    assert sample["input_ids"].tolist() == list(range(8))


@pytest.mark.parametrize("length", [2, 3, 8, 9])
def test_pieces_cover_every_document_of_two_tokens_or_more(length):
    lengths = numpy.arange(30)
    document, start, stop = pieces_of(lengths, length, split=True)
    assert (stop - start).max() <= length
    assert (stop - start).min() >= 2, "one token predicts nothing"
    learned = [
        (d, t) for d, a, b in zip(document, start, stop, strict=True) for t in range(a + 1, b)
    ]
    assert learned == [(d, t) for d in range(30) for t in range(1, d)]


# Cut, and one document per row.


def test_cut_rows_are_the_joined_documents():
    rows, samples = rows_of(Documents.numbered(5, 0, 1, 13, 6), 6, "cut")
    assert [sample["input_ids"].tolist() for sample in samples] == torch.arange(24).view(
        4, 6
    ).tolist()
    uncounted = [
        token
        for sample in samples
        for token in sample["input_ids"][sample["labels"] == IGNORE_INDEX].tolist()
    ]
    assert uncounted == [0, 5, 6, 19], "the first of each document"
    assert rows.padding_share == 0
    assert "position_ids" not in samples[0]


def test_cut_leaves_out_the_rest_that_fills_no_row():
    assert len(rows_of(Documents.numbered(5, 6), 6, "cut")[0]) == 1


def test_unpacked_rows_are_the_documents_in_order():
    _, samples = rows_of(Documents.numbered(3, 9, 2), 4, "off", "truncate")
    assert [sample["input_ids"].tolist() for sample in samples] == [
        [0, 1, 2],
        [3, 4, 5, 6],
        [12, 13],
    ]


# Batches.


def test_a_batch_is_padded_to_the_rows_length_with_a_document_of_its_own():
    packing = Packing(10, "best_fit", "split")
    samples = [
        {
            "input_ids": torch.tensor([4, 5, 6, 7]),
            "labels": torch.tensor([-100, 5, -100, 7]),
            "position_ids": torch.tensor([0, 1, 0, 1]),
        }
    ]
    batch = packing.collate(samples, pad_id=3)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7] + [3] * 6]
    assert batch["labels"].tolist() == [[-100, 5, -100, 7] + [-100] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch["tokens"] == 4
    assert batch["counted"] == 2
    assert all(batch[name].dtype == torch.int64 for name in ("input_ids", "labels", "position_ids"))


def test_an_unpacked_batch_is_padded_to_its_longest():
    documents = Documents.numbered(3, 5, 2)
    batch = Packing(10, "off", "truncate").collate([documents[number] for number in range(3)])
    assert batch["input_ids"].shape == (3, 5)
    assert batch["tokens"] == 10
    assert batch["counted"] == 2 + 4 + 1


# Shares.


def test_shares_are_those_since_they_were_last_read():
    packing, shares = Packing(10, "best_fit", "split"), TokenShares()
    for _ in range(2):
        batch = packing.collate(rows_of(Documents.numbered(4, 4), 10)[1])
        assert shares.count(batch) == 8
        assert shares.read(World()) == pytest.approx({"padding_pct": 20, "counted_pct": 75})


def test_shares_tell_the_sources_of_counted_tokens():
    shares = TokenShares(["wiki", "code"])
    labels, sources = torch.tensor([[-100, 1, 2, 3, -100]]), torch.tensor([[0, 0, 1, 1, 1]])
    assert shares.count({"labels": labels, "tokens": 5, "counted": 3, "source_ids": sources}) == 5
    assert shares.read(World()) == pytest.approx(
        {
            "padding_pct": 0,
            "counted_pct": 60,
            "counted_pct_wiki": 100 / 3,
            "counted_pct_code": 200 / 3,
        }
    )


def language_model(folder, *argv):
    """A run of the shipped model on 60 texts of 10 to 69 bytes."""
    (folder / "texts.jsonl").write_text(
        "".join(f'{{"text": "{"ab" * (5 + n // 2)}"}}\n' for n in range(60))
    )
    small = (
        "--task.args.context 31 --task.args.width 16 --task.args.heads 2 --task.args.layers 1"
    ).split()
    return make_run(
        World(), None, *small, "--data.path", folder / "texts.jsonl", "--use_amp", "false", *argv
    )


@pytest.mark.parametrize("pack", ["off", "best_fit"])
def test_the_shipped_model_trains_on_rows_of_each_kind_and_its_shares_are_metrics(tmp_path, pack):
    run = language_model(tmp_path, "--data.pack", pack)
    (report,) = take_steps(run, 1)
    values = {name: float(value) for name, value in train_metrics(run, report).items()}
    batch = run.data.last_step[0][0]
    assert values["train/counted_pct"] == pytest.approx(100 * batch["counted"] / batch["tokens"])
    assert values["train/padding_pct"] == pytest.approx(
        100 - 100 * batch["tokens"] / batch["labels"].numel()
    )
    assert torch.isfinite(report.losses[0])
    assert float(report.weight) == batch["counted"]
    assert ("position_ids" in batch) == (pack == "best_fit")


# Bad inputs.


@pytest.mark.bad_input("`data.long_documents=refuse` with a document longer than a row")
def test_an_over_long_document_is_refused_by_name():
    with pytest.raises(
        DataError, match=r"document 1 has 9 tokens, and a row 6 \(2 documents are too long\);"
    ):
        Packing(6, "best_fit", "refuse").rows(Documents.numbered(6, 9, 7), "train")


@pytest.mark.bad_input(
    "`data.pack` or `data.long_documents` that need lengths, with a Parquet view's rows"
)
@pytest.mark.parametrize(
    ("packing", "words"),
    [
        (Packing(6, "best_fit", "split"), "data.pack=best_fit"),
        (Packing(6, "cut", "split"), "data.pack=cut"),
        (Packing(6, "off", "refuse"), "data.long_documents=refuse"),
    ],
)
def test_documents_without_lengths_are_refused_with_what_to_run(packing, words):
    documents = Documents.numbered(3, 4)
    del documents.lengths
    with pytest.raises(
        ConfigError, match=rf"{words} needs the documents' lengths.* python -m dist_amp.tokenize"
    ):
        packing.rows(documents, "train")


def test_documents_without_lengths_are_truncated_where_they_are_read():
    documents = Documents.numbered(3, 9)
    del documents.lengths
    packing = Packing.of(DataConfig(pack="off"), 6, "cut")
    rows = packing.rows(documents, "train")
    assert packing.collate([rows[0], rows[1]])["input_ids"].shape == (2, 6)


@pytest.mark.bad_input("documents of which no token counts")
@pytest.mark.parametrize("pack", ["off", "cut", "best_fit"])
def test_documents_of_which_no_token_counts_are_refused(pack):
    with pytest.raises(
        DataError, match=r"none of the \d+ train documents has anything to learn within"
    ):
        Packing(6, pack, "split").rows(Documents(torch.ones(8, 5), masked=range(8)), "train")


def test_a_few_documents_that_count_are_enough():
    """More rows than are looked at in the usual case."""
    rows = Packing(6, "off", "split").rows(
        Documents(torch.ones(999, 5), masked=set(range(999)) - {500}), "train"
    )
    assert len(rows) == 999


@pytest.mark.bad_input("`task.args.context 0`, or `task.args.length 1`")
@pytest.mark.parametrize(
    "target", ["dist_amp.tasks.causal_lm:CausalLM", "dist_amp.tasks.hf_causal_lm:HFCausalLM"]
)
def test_rows_of_a_single_token_are_refused(target, tmp_path):
    key, value, least = ("context", 0, 1) if "HF" not in target else ("length", 1, 2)
    model = ["--task.args.model", str(tmp_path)] if "HF" in target else []
    words = ["--task.target", target, *model, f"--task.args.{key}", str(value)]
    with pytest.raises(ConfigError, match=rf"task.args.{key}={value} .* must be at least {least}"):
        load_config(words, environ={})


@pytest.mark.parametrize(
    "row", ['{"text": "abcdefghijklmnop"}', '{"prompt": "abcdefg", "completion": "hijklmnop"}']
)
def test_a_piece_read_from_shards_is_that_part_of_its_document(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 3)
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), validation_split="train")
    documents = token_documents(data, "train", open_tokenizer("bytes"))
    whole = documents[1]
    wanted = [(1, start, stop) for start in range(16) for stop in range(start + 1, 18)]
    for (_, start, stop), piece in zip(wanted, documents.pieces(wanted), strict=True):
        for name in ("input_ids", "labels"):
            assert torch.equal(piece[name], whole[name][start:stop])
