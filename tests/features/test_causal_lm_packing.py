"""Documents in rows: which tokens are where, what counts, how full rows are, and bad inputs."""

from itertools import pairwise

import numpy
import pyarrow.parquet
import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import make_run, parameters_of, save, take_steps
from torch.utils._python_dispatch import TorchDispatchMode

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
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.world import World


class Documents:
    """A token dataset: all tokens count but each document's first, and those in `masked`."""

    vocabulary = 256
    fingerprint = "documents"

    def __init__(self, ids, masked=()):
        self.ids = [torch.as_tensor(one, dtype=torch.int64) for one in ids]
        self.lengths = numpy.array([len(one) for one in self.ids])
        self.firsts = numpy.ones(len(ids), int)
        self.masked = set(masked)

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


# Best fit.


def test_every_document_is_whole_in_one_row_once_and_all_but_its_first_token_count():
    documents = Documents.random(500, 2, 30, 256)
    rows = rows_of(documents, 30)
    found = [document for sample in rows for document in documents_in(sample)]
    assert sorted(found) == sorted(one.tolist() for one in documents.ids)
    assert max(rows.lengths) <= 30
    assert rows.lengths.tolist() == [len(sample["input_ids"]) for sample in rows]
    for sample in rows:
        first = sample["position_ids"] == 0
        expected = torch.where(first, IGNORE_INDEX, sample["input_ids"])
        assert torch.equal(sample["labels"], expected)


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


def test_rows_of_usual_documents_are_nearly_full():
    """Log-normal lengths, as of web pages: under 0.1 % padding, far less than unpacked."""
    documents = Documents([])
    drawn = numpy.random.default_rng(0).normal(6, 1.2, 20_000)
    documents.lengths = numpy.exp(drawn).astype(int) + 2
    assert rows_of(documents, 2048).padding_share < 0.001
    assert rows_of(documents, 2048, "off").padding_share > 0.5


def test_a_rows_documents_are_no_neighbours_in_the_source():
    rows = rows_of(Documents([[number // 256, number % 256, 0] for number in range(3000)]), 12)
    numbers = [[256 * a + b for a, b, _ in documents_in(sample)] for sample in rows]
    distances = [abs(a - b) for row in numbers for a, b in pairwise(row)]
    # Two places drawn from 3,000 are 1,000 apart on average.
    assert 900 < sum(distances) / len(distances) < 1100


def test_rows_are_the_same_at_every_start_and_the_fingerprint_tells_documents_and_settings_apart():
    documents = Documents.random(300, 2, 30, 256)
    one, again = rows_of(documents, 30), rows_of(documents, 30)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, again, strict=True))
    assert one.fingerprint == again.fingerprint
    others = [
        rows_of(documents, 31),
        rows_of(documents, 30, "cut"),
        rows_of(documents, 30, "best_fit", "truncate"),
    ]
    prints = [rows.fingerprint for rows in (one, *others)]
    documents.fingerprint = "other"
    assert len({*prints, one.fingerprint}) == 5


# Long documents.


def test_a_split_document_counts_each_token_once_after_the_token_before_it():
    rows = rows_of(Documents.numbered(21), 8)
    counted = torch.cat([sample["labels"][sample["labels"] != IGNORE_INDEX] for sample in rows])
    assert sorted(counted.tolist()) == list(range(1, 21))
    assert sorted(sample["input_ids"][0].item() for sample in rows) == [0, 7, 14]


@pytest.mark.parametrize("length", [2, 3, 8, 9])
def test_pieces_cover_every_document_of_two_tokens_or_more(length):
    document, start, stop = pieces_of(numpy.arange(30), length, split=True)
    assert (stop - start).max() <= length
    assert (stop - start).min() >= 2, "one token predicts nothing"
    pieces = zip(document, start, stop, strict=True)
    learned = [(d, t) for d, a, b in pieces for t in range(a + 1, b)]
    assert learned == [(d, t) for d in range(30) for t in range(1, d)]


# Cut, and one document per row.


def test_cut_rows_are_the_joined_documents_without_the_rest_that_fills_no_row():
    rows = rows_of(Documents.numbered(5, 0, 1, 13, 7), 6, "cut")
    ids = torch.stack([sample["input_ids"] for sample in rows])
    labels = torch.stack([sample["labels"] for sample in rows])
    assert torch.equal(ids, torch.arange(24).view(4, 6))
    assert ids[labels == IGNORE_INDEX].tolist() == [0, 5, 6, 19], "the first of each document"
    assert rows.padding_share == 0
    assert "position_ids" not in rows[0]


@pytest.mark.parametrize("pack", ["off", "best_fit"])
def test_truncated_documents_are_their_beginnings_in_order_if_unpacked(pack):
    rows = rows_of(Documents.numbered(3, 9, 2), 4, pack, "truncate")
    beginnings = [[0, 1, 2], [3, 4, 5, 6], [12, 13]]
    ids = [sample["input_ids"].tolist() for sample in rows]
    assert (ids if pack == "off" else sorted(ids)) == beginnings


# Batches.


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
    assert all(batch[name].dtype == torch.int64 for name in sample)


def test_an_unpacked_batch_is_padded_to_its_longest_and_truncated_to_the_length():
    """Also of documents of unknown lengths."""
    packing = Packing.of(DataConfig(pack="off"), 6, "cut")
    rows = packing.rows([Documents.numbered(3, 9, 2)[number] for number in range(3)], "train")
    batch = packing.collate(rows)
    assert batch["input_ids"].shape == (3, 6)
    assert packing.collate(rows[::2])["input_ids"].shape == (2, 3)
    assert (batch["tokens"], batch["counted"]) == (11, 2 + 5 + 1)


# Shares.


def test_shares_are_those_since_they_were_last_read():
    packing, shares = Packing(10, "best_fit", "split"), TokenShares()
    for _ in range(2):
        batch = packing.collate(list(rows_of(Documents.numbered(4, 4), 10)))
        assert shares.count(batch) == 8
        assert shares.read(World()) == pytest.approx({"padding_pct": 20, "counted_pct": 75})


@pytest.mark.parametrize("pack", ["best_fit", "off"])
def test_the_padding_that_is_said_at_the_start_is_that_of_the_metrics(pack, caplog):
    rows, shares = rows_of(Documents.numbered(9, 4, 3, 7), 10, pack), TokenShares()
    with caplog.at_level("INFO", "dist_amp"):
        rows.describe("train")
    shares.count(rows.packing.collate(list(rows)))
    read = float(shares.read(World())["padding_pct"])
    said = f"; {read:.2f}% of the places are padding"
    if pack == "off":
        said = "; a batch is padded to its longest row (train/padding_pct), not to that"
    assert caplog.messages[0].endswith(said)


def test_shares_tell_the_sources_of_counted_tokens():
    shares = TokenShares(["wiki", "code"])
    labels, sources = torch.tensor([[-100, 1, 2, 3, -100]]), torch.tensor([[0, 0, 1, 1, 1]])
    assert shares.count({"labels": labels, "tokens": 5, "counted": 3, "source_ids": sources}) == 5
    by_source = {"counted_pct_wiki": 100 / 3, "counted_pct_code": 200 / 3}
    expected = {"padding_pct": 0, "counted_pct": 60, **by_source}
    assert shares.read(World()) == pytest.approx(expected)


# As they are read, from a Parquet view.


def written_view(folder):
    """256 documents of 1 to 60 bytes in row groups of 8."""
    sizes = torch.randint(1, 60, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = {"text": [chr(97 + number % 26) * size for number, size in enumerate(sizes)]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "train.parquet", row_group_size=8)
    rows = {"text": ["held", "out"]}
    pyarrow.parquet.write_table(pyarrow.table(rows), folder / "validation.parquet")


def run_of_view(world, folder, pack, ranks_micro_batch, *more):
    task = CausalLM(
        DataConfig(path=str(folder), view="parquet", streams=8, pack=pack), context=31, width=32
    )
    words = ["--train.global_batch_size", 32, "--train.micro_batch_size", ranks_micro_batch]
    words += ["--data.path", folder, "--precision.use_amp", "false", "--optim.name", "sgd"]
    return make_run(world, task, *words, "--optim.warmup_steps", 0, *more)


def view_steps(world, folder, pack, micro_batch, steps):
    run = run_of_view(world, folder, pack, micro_batch)
    reports = take_steps(run, steps)
    sums = world.sum(torch.stack([report.loss_sum for report in reports]))
    rows = [len(batch["input_ids"]) for batch, _ in run.data.last_step if isinstance(batch, dict)]
    values = {name: value.numpy() for name, value in parameters_of(run).items()}
    return sums.tolist(), [float(report.weight) for report in reports], rows, values


def test_documents_packed_as_they_are_read_compute_the_step_of_a_document_per_row(tmp_path):
    written_view(tmp_path)
    off = view_steps(World(), tmp_path, "off", 8, 10)
    packed = view_steps(World(), tmp_path, "best_fit", 8, 10)
    on_two, _ = on_ranks(2, view_steps, tmp_path, "best_fit", 4, 10)
    assert off[2] == [8, 8, 8, 8]
    assert max(packed[2]) < 8, "fewer rows"
    for other in packed, on_two:
        assert other[1] == off[1], "the same tokens count"
        # Sums in another order, in float32, over ten steps.
        torch.testing.assert_close(other[0], off[0], rtol=1e-5, atol=0)
        for name, value in off[3].items():
            torch.testing.assert_close(torch.tensor(other[3][name]), torch.tensor(value), msg=name)


def test_a_run_that_packs_as_it_reads_resumes_to_the_bit(tmp_path):
    rows = tmp_path / "rows"
    for name in "rows", "run":
        (tmp_path / name).mkdir()
    written_view(rows)
    more = ["--run.dir", tmp_path / "run", "--data.workers", 1]
    run = run_of_view(World(), rows, "best_fit", 8, *more)
    take_steps(run, 3)
    save(run)
    take_steps(run, 7)
    again = run_of_view(World(), rows, "best_fit", 8, *more, "--run.resume", "auto")
    assert again.step == 3
    take_steps(again, 7)
    run.data.close()
    again.data.close()
    for name, value in parameters_of(run).items():
        assert torch.equal(value, parameters_of(again)[name]), name


def test_a_micro_batchs_documents_are_packed_whole_or_by_their_beginning():
    packing = Packing(6, "best_fit", "truncate")
    samples = [{"input_ids": ids, "labels": ids} for ids in torch.arange(20).split([4, 9, 2, 1, 4])]
    samples = [{name: x.clone() for name, x in sample.items()} for sample in samples]
    batch = packing.collate(samples)
    assert batch["input_ids"].shape == (3, 6)
    rows = [
        documents_in({name: batch[name][row] for name in ("input_ids", "position_ids")})
        for row in range(3)
    ]
    documents = [document for row in rows for document in row]
    for document in [0, 1, 2, 3], [4, 5, 6, 7, 8, 9], [13, 14], [15], [16, 17, 18, 19]:
        assert document in documents
    assert batch["counted"] == (4 - 1) + (6 - 1) + (2 - 1) + (1 - 1) + (4 - 1)
    assert batch["tokens"] == 4 + 6 + 2 + 1 + 4


# Bad inputs.


@pytest.mark.bad_input("`data.long_documents=refuse` with a document longer than a row")
def test_an_over_long_document_is_refused_by_name():
    packing = Packing(6, "best_fit", "refuse")
    said = message_of(65, packing.rows, Documents.numbered(6, 9, 7), "train")
    assert said.startswith("document 1 has 9 tokens, and a row 6 (2 documents are too long);")


@pytest.mark.bad_input(
    "`data.pack` or `data.long_documents` that need lengths, with a Parquet view's rows"
)
@pytest.mark.parametrize(
    ("pack", "long_documents"), [("best_fit", "split"), ("cut", "split"), ("off", "refuse")]
)
def test_documents_without_lengths_are_refused_with_what_to_run(pack, long_documents):
    packing = Packing(6, pack, long_documents)
    said = message_of(64, packing.rows, [{}], "train")
    assert said.startswith(f"data.pack={pack} with data.long_documents={long_documents} needs ")
    assert " python -m dist_amp.tokenize" in said
    assert Packing.of(DataConfig(pack="best_fit", view="parquet"), 6, "cut") == Packing(
        6, "best_fit", "truncate"
    )


@pytest.mark.bad_input("documents of which no token counts")
@pytest.mark.parametrize("pack", ["off", "cut", "best_fit"])
def test_documents_of_which_no_token_counts_are_refused(pack):
    packing = Packing(6, pack, "split")
    masked = Documents(torch.ones(8, 5), masked=range(8))
    said = message_of(65, packing.rows, masked, "train")
    assert said.startswith("none of the 8 train documents has anything to learn within")
    # One that counts is enough, though it is not among those that are looked at in the usual case.
    some = Documents(torch.ones(999, 5), masked=set(range(999)) - {500})
    assert packing.rows(some, "train") is not None


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


@pytest.mark.parametrize(("multiple", "width"), [(1, 9), (4, 12), (8, 16), (128, 20)])
def test_unpacked_rows_are_padded_to_a_multiple_but_never_beyond_the_length(multiple, width):
    samples = [{"input_ids": torch.arange(n) + 5, "labels": torch.arange(n) + 5} for n in (3, 9, 6)]
    batch = Packing(20, "off", "truncate", multiple).collate(samples, 1, attention_mask=True)
    assert batch["input_ids"].shape == (3, width)
    assert batch["attention_mask"].sum(1).tolist() == [3, 9, 6]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 1).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (batch["tokens"], batch["counted"]) == (18, 15)


def test_another_padding_is_no_other_data():
    one, other = (Packing.of(DataConfig(), 8, "off", multiple) for multiple in (1, 64))
    assert str(one) == str(other)


class Copies(TorchDispatchMode):
    """What is copied to another device while the host waits."""

    def __init__(self):
        super().__init__()
        self.blocking = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        options = kwargs or {}
        if "device" in options and not options.get("non_blocking"):
            self.blocking.append((str(operation), options["device"]))
        return operation(*args, **options)


def test_shares_are_copied_to_the_device_without_waiting_for_it():
    shares = TokenShares()
    shares.count({"labels": torch.zeros(2, 8), "tokens": 12, "counted": 10})
    with Copies() as copies:
        read = shares.read(World(device=torch.device("meta")))
    assert read["padding_pct"].device.type == "meta"
    assert not copies.blocking
