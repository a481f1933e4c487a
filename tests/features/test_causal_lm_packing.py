"""Documents in rows: which tokens are where, what counts, how full rows are, and bad inputs."""

import hashlib

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
    """A token dataset: all tokens count but each document's first, and those in `masked`."""

    vocabulary = 256
    fingerprint = "documents"

    def __init__(self, ids, masked=()):
        self.ids = [torch.as_tensor(one, dtype=torch.int64) for one in ids]
        self.lengths = numpy.array([len(one) for one in self.ids])
        self.masked = set(masked)
        self.firsts = numpy.array([100 if n in self.masked else 1 for n in range(len(ids))])

    @classmethod
    def random(cls, count, low, high, vocabulary):
        """`count` documents of low to high tokens."""
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
        labels[: None if index in self.masked else 1] = IGNORE_INDEX
        return {"input_ids": self.ids[index], "labels": labels}

    def pieces(self, pieces):
        return [
            {name: x[start:stop] for name, x in self[number].items()}
            for number, start, stop in pieces
        ]


def rows_of(documents, length, pack="best_fit", long_documents="split"):
    return PackedRows(documents, Packing(length, pack, long_documents))


def documents_in(row):
    """The token lists of a packed row's documents."""
    begins = (row["position_ids"] == 0).nonzero().flatten().tolist()
    ends = [*begins[1:], None]
    return [row["input_ids"][a:b].tolist() for a, b in zip(begins, ends, strict=True)]


def test_every_document_is_whole_in_one_row_once_and_all_but_its_first_token_count():
    documents = Documents.random(500, 2, 30, 256)
    rows = rows_of(documents, 30)
    found = [document for sample in rows for document in documents_in(sample)]
    assert sorted(found) == sorted(one.tolist() for one in documents.ids)
    assert max(rows.lengths) <= 30
    assert rows.lengths.tolist() == [len(sample["input_ids"]) for sample in rows]
    for sample in rows:
        expected = sample["input_ids"].where(sample["position_ids"] > 0, IGNORE_INDEX)
        assert torch.equal(sample["labels"], expected)


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
    rows = rows_of(Documents.random(500, 2, 60, 256), 30, *settings)
    found = repr([rows.pieces(number) for number in range(len(rows))])
    assert hashlib.sha256(found.encode()).hexdigest()[:12] == pieces
    assert rows.fingerprint == fingerprint


@pytest.mark.parametrize("length", [2, 3, 8, 9])
def test_each_token_of_a_split_document_counts_once_after_the_token_before_it(length):
    documents = Documents.numbered(*range(30))
    learned = []
    for row in rows_of(documents, length):
        assert len(row["input_ids"]) <= length
        for before, label in zip(row["input_ids"], row["labels"][1:], strict=False):
            if label != IGNORE_INDEX:
                assert before == label - 1
                learned.append(int(label))
    assert sorted(learned) == [int(token) for one in documents.ids for token in one[1:]]


def test_cut_rows_are_the_joined_documents_without_the_remainder_that_fills_no_row():
    rows = rows_of(Documents.numbered(5, 0, 1, 13, 7), 6, "cut")
    ids = torch.stack([sample["input_ids"] for sample in rows])
    labels = torch.stack([sample["labels"] for sample in rows])
    assert ids.tolist() == torch.arange(24).view(4, 6).tolist()
    assert ids[labels == IGNORE_INDEX].tolist() == [0, 5, 6, 19], "the first of each document"
    assert rows.padding_share == 0
    assert "position_ids" not in rows[0]


@pytest.mark.parametrize("pack", ["off", "best_fit"])
def test_truncated_documents_are_their_beginnings_in_order_if_unpacked(pack):
    rows = rows_of(Documents.numbered(3, 9, 2), 4, pack, "truncate")
    beginnings = [[0, 1, 2], [3, 4, 5, 6], [12, 13]]
    ids = [sample["input_ids"].tolist() for sample in rows]
    assert (ids if pack == "off" else sorted(ids)) == beginnings


# ---- batches ----


def test_a_batch_is_padded_to_the_rows_length_with_a_document_of_its_own():
    sample = {
        "input_ids": torch.tensor([4, 5, 6, 7]),
        "labels": torch.tensor([-100, 5, -100, 7]),
        "position_ids": torch.tensor([0, 1, 0, 1]),
    }
    batch = Packing(10, "best_fit", "split").collate([sample], pad_id=3)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7] + [3] * 6]
    assert batch["labels"].tolist() == [[-100, 5, -100, 7] + [-100] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 0, 1, 2, 3, 4, 5]]
    assert (batch["tokens"], batch["counted"]) == (4, 2)


@pytest.mark.parametrize(
    ("length", "multiple", "width"),
    [(20, 4, 12), (20, 128, 20), (6, 1, 6)],
)
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


def test_a_micro_batchs_documents_are_packed_whole_or_by_their_beginning():
    samples = [
        {"input_ids": ids.clone(), "labels": ids.clone()}
        for ids in torch.arange(20).split([4, 9, 2, 1, 4])
    ]
    packing = Packing.of(DataConfig(pack="best_fit", view="parquet"), 6, "cut")
    assert packing == Packing(6, "best_fit", "truncate"), "a view knows no lengths to split by"
    batch = packing.collate(samples)
    documents = []
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        documents += documents_in({"input_ids": ids, "position_ids": positions})
    beginnings = [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [13, 14], [15], [16, 17, 18, 19]]
    assert sorted(one for one in documents if any(one)) == beginnings
    assert (batch["tokens"], batch["counted"]) == (4 + 6 + 2 + 1 + 4, 3 + 5 + 1 + 0 + 3)


def test_shares_are_those_since_they_were_last_read_and_tell_sources_apart():
    shares = TokenShares(["wiki", "code"])
    labels, sources = torch.tensor([[-100, 1, 2, 3, -100]]), torch.tensor([[0, 0, 1, 1, 1]])
    batch = {"labels": labels, "counted": 3, "source_ids": sources}
    by_source = {"counted_pct_wiki": 100 / 3, "counted_pct_code": 200 / 3}
    for tokens, padding, counted in ((4, 20, 75), (5, 0, 60)):
        assert shares.count({**batch, "tokens": tokens}) == tokens
        expected = {"padding_pct": padding, "counted_pct": counted, **by_source}
        assert shares.read(World()) == pytest.approx(expected)


# ---- documents as they are read ----


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    """256 documents of 1 to 60 bytes in row groups of 8, and two held out."""
    folder = tmp_path_factory.mktemp("view")
    sizes = torch.randint(1, 60, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [chr(97 + number % 26) * size for number, size in enumerate(sizes)]
    for split, rows in (("validation", ["held", "out"]), ("train", texts)):
        table = pyarrow.table({"text": rows})
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet", row_group_size=8)
    return folder


def run_of_view(world, folder, pack, micro_batch, *more):
    data = DataConfig(path=str(folder), view="parquet", streams=8, pack=pack)
    words = ["--train.global_batch_size", 32, "--train.micro_batch_size", micro_batch]
    words += ["--data.path", folder, "--precision.use_amp", "false", "--optim.name", "sgd"]
    task = CausalLM(data, context=31, width=32)
    return make_run(world, task, *words, "--optim.warmup_steps", 0, *more)


def view_steps(world, folder, pack, micro_batch):
    run = run_of_view(world, folder, pack, micro_batch)
    reports = take_steps(run, 5)
    sums = world.sum(torch.stack([report.loss_sum for report in reports]))
    rows = [len(batch["input_ids"]) for batch, _ in run.data.last_step if isinstance(batch, dict)]
    return sums, [float(report.weight) for report in reports], rows, parameters_of(run)


def test_documents_packed_as_they_are_read_compute_the_step_of_a_document_per_row(view):
    off = view_steps(World(), view, "off", 8)
    packed = view_steps(World(), view, "best_fit", 8)
    on_two, _ = on_ranks(2, view_steps, view, "best_fit", 4)
    assert off[2] == [8, 8, 8, 8]
    assert sum(packed[2]) < sum(off[2])
    for other in packed, on_two:
        assert other[1] == off[1], "the same tokens count"
        # Sums in another order, in float32, over five steps.
        torch.testing.assert_close(other[0], off[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(other[3], off[3])


@pytest.mark.parametrize(
    "row", ['{"text": "abcdefghijklmnop"}', '{"prompt": "abcdefg", "completion": "hijklmnop"}']
)
def test_a_piece_read_from_shards_is_that_part_of_its_document(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 3)
    data = DataConfig(path=str(tmp_path / "rows.jsonl"), validation_split="train")
    documents = token_documents(data, "train", open_tokenizer("bytes"))
    wanted = [(1, start, stop) for start in range(16) for stop in range(start + 1, 18)]
    for (_, start, stop), piece in zip(wanted, documents.pieces(wanted), strict=True):
        for name, values in documents[1].items():
            assert piece[name].tolist() == values[start:stop].tolist()


# ---- bad inputs ----

ALL_MASKED = Documents(torch.ones(8, 5), masked=range(8))


@pytest.mark.bad_input("documents too few, without lengths or with nothing to learn")
@pytest.mark.parametrize(
    ("settings", "documents", "status", "message"),
    [
        (("cut", "split"), [{}], 64, "data.pack=cut needs the documents"),
        (("best_fit", "split"), [{}], 64, "data.pack=best_fit needs the documents"),
        (("cut", "split"), Documents.numbered(2, 3), 65, "the 2 train documents have 5 tokens in"),
        (("best_fit", "truncate"), ALL_MASKED, 65, "the 8 train documents have 40 tokens in all, "),
    ],
)
def test_documents_that_make_no_rows_are_refused(settings, documents, status, message):
    text = message_of(status, Packing(6, *settings).rows, documents, "train")
    assert text.startswith(message)
    assert Packing(6, "cut", "split").rows(Documents.numbered(2, 3), "validation") is None
