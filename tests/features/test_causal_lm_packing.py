"""Documents in rows: which tokens are where, what counts, how full rows are, and bad inputs."""

import hashlib
import re

import numpy
import pyarrow.parquet
import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import make_run, parameters_of, take_steps

from dist_amp.settings import DataConfig
from dist_amp.sources.packing import IGNORE_INDEX, PackedRows, Packing, TokenShares
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("own_cache")


class Documents:
    """A token dataset, in each of whose documents the tokens from number `first` on count."""

    vocabulary = 256
    fingerprint = "documents"

    def __init__(self, ids, first=1):
        self.ids = [torch.as_tensor(one, dtype=torch.int64) for one in ids]
        self.lengths = numpy.array([len(one) for one in self.ids])
        self.firsts = numpy.full(len(ids), first)

    @classmethod
    def random(cls, count, low, high, vocabulary):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
        return cls([torch.randint(1, vocabulary, (n,), generator=generator) for n in lengths])

    @classmethod
    def numbered(cls, *lengths):
        """Each token is its number in the joined stream."""
        return cls(torch.arange(sum(lengths)).split(list(lengths)))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        labels = self.ids[index].clone()
        labels[: self.firsts[index]] = IGNORE_INDEX
        return {"input_ids": self.ids[index], "labels": labels}

    def pieces(self, pieces):
        return [{name: x[a:b] for name, x in self[number].items()} for number, a, b in pieces]


def documents_in(row):
    """The token lists of a packed row's documents."""
    begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], None]
    return [row["input_ids"][a:b].tolist() for a, b in zip(begins, ends, strict=True)]


@pytest.mark.parametrize(
    ("settings", "pieces", "fingerprint"),
    [
        (("best_fit", "split"), "cdb30967e447", "226288c7650dc5c4"),
        (("best_fit", "truncate"), "0b91ab3938af", "b2d3942e52c63a6b"),
        (("cut", "split"), "32cdd0e5f90d", "145d889e16684cee"),
        (("off", "truncate"), "127604c218fe", "9c1a6cfe9a680332"),
    ],
)
def test_rows_and_their_fingerprint_are_those_of_every_version(settings, pieces, fingerprint):
    rows = PackedRows(Documents.random(500, 2, 60, 256), Packing(30, *settings))
    found = repr([rows.pieces(number) for number in range(len(rows))])
    assert hashlib.sha256(found.encode()).hexdigest()[:12] == pieces
    assert rows.fingerprint == fingerprint


@pytest.mark.parametrize("length", [2, 3, 9, 30])
def test_each_token_counts_once_after_the_token_before_it_and_what_fits_is_in_one_row(length):
    documents = Documents.numbered(*range(30))
    rows = PackedRows(documents, Packing(length, "best_fit", "split"))
    assert rows.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert max(rows.lengths) <= length
    if length == 30:
        whole = [document for row in rows for document in documents_in(row)]
        assert sorted(whole) == [one.tolist() for one in documents.ids if len(one) > 1]
    learned = []
    for row in rows:
        for before, label in zip(row["input_ids"], row["labels"][1:], strict=False):
            if label != IGNORE_INDEX:
                assert before == label - 1
                learned.append(int(label))
    assert sorted(learned) == [int(token) for one in documents.ids for token in one[1:]]


def test_cut_rows_are_the_joined_documents_without_the_remainder_that_fills_no_row():
    rows = PackedRows(Documents.numbered(5, 0, 1, 13, 7), Packing(6, "cut", "split"))
    ids = torch.stack([sample["input_ids"] for sample in rows])
    labels = torch.stack([sample["labels"] for sample in rows])
    assert ids.tolist() == torch.arange(24).view(4, 6).tolist()
    assert ids[labels == IGNORE_INDEX].tolist() == [0, 5, 6, 19], "the first of each document"
    assert rows.lengths.tolist() == [6] * 4
    assert "position_ids" not in rows[0]


@pytest.mark.parametrize(("length", "multiple", "width"), [(20, 4, 12), (20, 128, 20), (6, 1, 6)])
def test_unpacked_rows_are_padded_to_a_multiple_but_never_beyond_the_length(
    length, multiple, width
):
    packing = Packing.of(DataConfig(pack="off"), length, "cut", multiple)
    samples = [{"input_ids": torch.arange(n) + 5, "labels": torch.arange(n) + 5} for n in (3, 9, 6)]
    batch = packing.collate(packing.rows(samples, "train"), 1, attention_mask=True)
    filled = [min(n, length) for n in (3, 9, 6)]
    assert batch["input_ids"].shape == (3, width)
    assert batch["attention_mask"].sum(1).tolist() == filled
    padding = batch["attention_mask"] == 0
    assert set(batch["input_ids"][padding].tolist()) == {1}
    assert set(batch["labels"][padding].tolist()) == {-100}
    assert (batch["tokens"], batch["counted"]) == (sum(filled), sum(filled) - 3)


def test_shares_are_those_since_they_were_last_read_and_tell_sources_apart():
    shares = TokenShares(["wiki", "code"])
    labels, sources = torch.tensor([[-100, 1, 2, 3, -100]]), torch.tensor([[0, 0, 1, 1, 1]])
    batch = {"labels": labels, "counted": 3, "source_ids": sources}
    by_source = {"counted_pct_wiki": 100 / 3, "counted_pct_code": 200 / 3}
    for tokens, padding, counted in ((4, 20, 75), (5, 0, 60)):
        assert shares.count({**batch, "tokens": tokens}) == tokens
        expected = {"padding_pct": padding, "counted_pct": counted, **by_source}
        assert shares.read(World()) == pytest.approx(expected)


def view_steps(world, folder, pack, micro_batch):
    words = "--train.global_batch_size 32 --use_amp false --optim.name sgd --optim.warmup_steps 0"
    data = DataConfig(path=str(folder), view="parquet", streams=8, pack=pack)
    task = CausalLM(data, context=31, width=32)
    run = make_run(world, task, *words.split(), "--train.micro_batch_size", micro_batch)
    reports = take_steps(run, 3)
    sums = world.sum(torch.stack([report.loss_sum for report in reports]))
    rows = [len(batch["input_ids"]) for batch, _ in run.data.last_step if isinstance(batch, dict)]
    return sums, [float(report.weight) for report in reports], rows, parameters_of(run)


def test_documents_packed_as_they_are_read_compute_the_step_of_a_document_per_row(tmp_path):
    sizes = torch.randint(1, 60, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    table = pyarrow.table({"text": [chr(97 + n % 26) * size for n, size in enumerate(sizes)]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet", row_group_size=8)
    off = view_steps(World(), tmp_path, "off", 8)
    packed = view_steps(World(), tmp_path, "best_fit", 8)
    on_two, _ = on_ranks(2, view_steps, tmp_path, "best_fit", 4)
    assert off[2] == [8, 8, 8, 8]
    assert sum(packed[2]) < sum(off[2])
    for other in packed, on_two:
        assert other[1] == off[1], "the same tokens count"
        # Sums in another order, in float32, over three steps.
        torch.testing.assert_close(other[0], off[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(other[3], off[3])


def test_a_piece_read_from_shards_is_that_part_of_its_document(tmp_path):
    row = '{"prompt": "abcdefg", "completion": "hijklmnop"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 3)
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), validation_split="train")
    documents = token_documents(data, "train", open_tokenizer("bytes"))
    places = [(1, start, stop) for start in range(16) for stop in range(start + 1, 18)]
    for (_, start, stop), piece in zip(places, documents.pieces(places), strict=True):
        expected = {name: values[start:stop] for name, values in documents[1].items()}
        torch.testing.assert_close(piece, expected)


ALL_MASKED = Documents(torch.ones(8, 7), first=6)  # whose answers come after a row


@pytest.mark.bad_input("documents too few, without lengths or with nothing to learn")
@pytest.mark.parametrize(
    ("settings", "documents", "status", "message"),
    [
        (("cut", "truncate"), [{}], 64, "data.pack=cut needs the documents"),
        (("best_fit", "split"), [{}], 64, "data.pack=best_fit needs the documents"),
        (("cut", "split"), Documents.numbered(2, 3), 65, "the 2 train .* use shorter rows"),
        (("best_fit", "truncate"), ALL_MASKED, 65, "the 8 train .* 56 .* use longer rows"),
    ],
)
def test_documents_that_make_no_rows_are_refused(settings, documents, status, message):
    text = message_of(status, Packing(6, *settings).rows, documents, "train")
    assert re.match(message, text)
    assert Packing(6, "cut", "split").rows(Documents.numbered(2, 3), "validation") is None
