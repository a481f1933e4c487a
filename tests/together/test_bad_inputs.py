"""Bad inputs that no other file tests: one line that names the value, the rule and the fix, and its
exit status.
"""

import errno
import json
import multiprocessing
import os
import re
import signal
import socket

import bad_inputs
import datasets
import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from tiny import Rows, Tiny, make_run, take_steps
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.settings import RunConfig
from dist_amp.sources import files as documents
from dist_amp.sources.load import load_split
from dist_amp.step import evaluate
from dist_amp.supervise.explain import explain_error
from dist_amp.supervise.lifecycle import Job
from dist_amp.world import World, start

SMALL = ["--train.micro_batch_size", 4, "--data.shuffle", "false"]


def test_no_bad_input_has_lost_its_test():
    assert len(bad_inputs.rows()) >= 100
    assert bad_inputs.INDEX.read_text() == bad_inputs.index(), "run python tests/bad_inputs.py"


# ---- rendezvous ----


@pytest.mark.bad_input("a rank that never joins, or another program at its address")
@pytest.mark.bad_input("MASTER_ADDR or MASTER_PORT missing")
@pytest.mark.parametrize(
    ("rank", "host", "listens", "status", "said"),
    [
        (
            0,
            "127.0.0.1",
            None,
            1,
            "rank 1 of 2 has not joined at {} within run.timeout_seconds=1; ",
        ),
        (1, "127.0.0.1", None, 1, "no rank 0 at {} within run.timeout_seconds=1 (Connection refu"),
        (0, "127.0.0.1", "", 1, "MASTER_PORT={port} on 127.0.0.1 is in use; choose another"),
        (1, "127.0.0.1", "127.0.0.1", 1, "no rank 0 at {} within run.timeout_seconds=1 (no answer"),
        (1, "", None, 64, "MASTER_ADDR='' and MASTER_PORT="),
    ],
)
def test_a_rank_that_meets_nobody_or_another_program_names_who_is_missing_where(
    rank, host, listens, status, said, monkeypatch
):
    monkeypatch.setattr("dist_amp.world.configure_logging", lambda rank: None)
    with socket.create_server((listens or "", 0)) as other:
        port = other.getsockname()[1]
        if listens is None:
            other.close()
        place = {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))
        message = message_of(status, start(RunConfig(timeout_seconds=1)).__enter__)
    assert message.startswith(said.format(f"{host}:{port}", port=port))


# ---- samples ----


class Broken(Rows):
    """Rows of which one can't be read."""

    def __getitem__(self, index):
        if index == 17:
            raise OSError("cannot identify image file\nin some detail")
        return super().__getitem__(index)


class ManyAtOnce(Broken):
    """As a dataset of the `datasets` library reads."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Ragged(Rows):
    def __getitem__(self, index):
        row = super().__getitem__(index)
        return row | {"x": row["x"][:5]} if index == 18 else row


class ReadsFrom(Tiny):
    """Tiny on rows of the given class, in its training or its validation split."""

    def __init__(self, rows, validation=False):
        super().__init__()
        self.rows = rows
        self.bad_split = "validation" if validation else "train"

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        return self.rows(**rows.columns) if split == self.bad_split else rows


def what_reading_says(task, *words, read=lambda run: take_steps(run, 5)):
    run = make_run(World(), task, *SMALL, *words)
    try:
        return message_of(65, read, run)
    finally:
        run.data.close()


@pytest.mark.bad_input("a corrupt file, row, image; a token id or label out of range")
@pytest.mark.parametrize(("rows", "workers"), [(Broken, 0), (ManyAtOnce, 1)])
def test_a_sample_that_cannot_be_read_is_named_with_its_rank(rows, workers):
    message = what_reading_says(ReadsFrom(rows), "--data.workers", workers)
    said = "sample 17 of the training split could not be read: OSError: cannot identify image file"
    assert message.startswith(f"rank 0: {said} (test_bad_")
    assert message.endswith("); fix or remove it")
    task = ReadsFrom(rows, validation=True)
    words = ["--eval.every", 1, "--data.workers", workers]
    message = what_reading_says(task, *words, read=evaluate)
    assert "sample 17 of the validation split could not be read" in message


@pytest.mark.bad_input("samples that can't be collated into a batch")
@pytest.mark.bad_input("samples with a column that is missing, None, or of another type or length")
def test_samples_that_do_not_make_a_batch_are_named():
    message = what_reading_says(ReadsFrom(Ragged), "--data.workers", 1)
    said = "samples 16, 17, 18, 19 of the training split do not make one batch: "
    said += r"x is Tensor \[\d+\] in sample \d+, Tensor \[8\] in the first: RuntimeError"
    assert re.search(said, message), message
    assert message.endswith("the same keys, shapes and types, or the task a collate(samples)")


def test_a_sample_that_one_rank_cannot_read_ends_the_job_in_one_line_that_names_both(
    launch, tmp_path
):
    (tmp_path / "broken.py").write_text(
        "from test_bad_inputs import Broken, ReadsFrom\n\nclass Task(ReadsFrom):\n"
        "    def __init__(self):\n        super().__init__(Broken)\n"
    )
    words = [*SMALL, "--task.target", "broken:Task", "--data.workers", 1, "--run.dir", "run"]
    done = launch.each(2, *words)
    errors = "".join(rank.stderr for rank in done)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["exit_code"] == 65
    said = "rank 1: sample 17 of the training split could not be read: OSError: cannot"
    assert summary["cause"].startswith(said)
    assert errors.splitlines().count(f"error: {summary['cause']}") == 1
    assert "rank 1: Traceback" not in errors


class LooksForInput(Tiny):
    def loss_sum(self, model, batch):
        return model(batch["input"]).sum()


@pytest.mark.bad_input("a key that a batch does not have, in `loss_sum`, `weight` or `metrics`")
def test_a_key_that_the_batch_does_not_have_is_named_with_those_it_has():
    run = make_run(World(), LooksForInput())
    error = explained(run, take_steps, run, 1)
    assert isinstance(error, DataError)
    said = "the task looks for 'input' in a batch that has x, y, counts (KeyError: 'input' ("
    assert f"rank 3: {said}" in str(error)


# ---- indices out of range ----


class Classes(Tiny):
    """An embedding of 10 tokens, and 4 classes. Batch: token [B], label [B]."""

    def __init__(self, **wrong):
        super().__init__()
        self.wrong = wrong

    def build_model(self):
        return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))

    def build_dataset(self, split):
        columns = {"token": torch.arange(64) % 10, "label": torch.arange(64) % 4}
        for name, value in self.wrong.items():
            columns[name][13] = value
        return Rows(**columns)

    def loss_sum(self, model, batch):
        return F.cross_entropy(model(batch["token"]).float(), batch["label"], reduction="sum")

    def weight(self, batch):
        return len(batch["label"])


def explain(error, rank, run=None):
    return explain_error(error, Job(None, World(rank), run=run))


def explained(run, call, *args):
    """What the error of a call on rank 3 becomes."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (whatever torch raises)
        call(*args)
    return explain(caught.value, 3, run)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"token": 10}, "index out of range in self"), ({"label": 9}, "Target 9 is out of bounds.")],
)
def test_a_token_or_label_out_of_range_is_named_with_rank_and_the_samples_of_its_micro_batch(
    wrong, words
):
    settings = [*SMALL, "--train.accumulation_steps", 4, "--eval.every", 1]
    run = make_run(World(), Classes(**wrong), *settings)
    said = "rank 3: a token id or label is out of range in samples 12, 13, 14, 15 of the"
    for split, call, *args in (("training", take_steps, 1), ("validation", evaluate)):
        error = explained(run, call, run, *args)
        assert isinstance(error, DataError)
        assert str(error).startswith(f"{said} {split} split: {words}; fix the data, or give")


def test_an_index_out_of_range_on_a_gpu_is_explained_and_another_error_stays_what_it_is():
    text = "CUDA error: device-side assert triggered\nCUDA kernel errors might be"
    said = "rank 3: the GPU stopped at a device-side assert, typically a token id or label"
    assert str(explain(RuntimeError(text), 3)).startswith(said)
    run = make_run(World(), Classes(), *SMALL, "--eval.every", 1)
    take_steps(run, 1)
    assert isinstance(explained(run, nn.Embedding(2, 2), torch.tensor([2])), IndexError)
    assert isinstance(explained(run, [].pop), IndexError)
    other = RuntimeError("DataLoader timed out")
    assert explain(other, 2) is other


# ---- loader workers ----


# Set once the batches before it have arrived: torch reports their loss otherwise.
received = multiprocessing.get_context("fork").Event()


class Killed(Rows):
    """A row that kills its worker, as one too large for the memory does."""

    def __getitem__(self, index):
        if index == 17:
            received.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.bad_input("a loader worker killed")
def test_a_loader_worker_that_is_killed_is_named_with_rank_and_signal():
    run = make_run(World(), ReadsFrom(Killed), *SMALL, "--data.workers", 1)
    take_steps(run, 4)
    received.set()
    error = explained(run, take_steps, run, 1)
    (worker,) = run.data._batches._workers
    run.data.close()
    assert isinstance(error, DataError)
    # Which of torch's two messages comes first is random.
    how = "(was killed by signal: Killed|exited unexpectedly)"
    said = rf"rank 3: loader worker \(pid {worker.pid}\) {how}; .* lower data.workers"
    assert re.match(said, str(error))


class Unsendable:
    def __reduce__(self):
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.bad_input("batches of more tensors than a loader worker may open files")
def test_a_batch_that_a_worker_cannot_send_ends_the_run_with_the_cause(capfd):
    run = make_run(World(), ReadsFrom(Rows), *SMALL, "--data.workers", 1)
    run.data.fetch.collate = lambda samples: Unsendable()
    error = explained(run, take_steps, run, 1)  # and not a wait for ever
    run.data.close()
    assert "exit code 24; it had too many open files" in str(error)
    assert "a batch can't be sent: OSError: [Errno 24] Too many" in capfd.readouterr().err


# ---- the hub ----


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Where the hub should be, nobody answers; and its library may yet try."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(documents, "getproxies", dict)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def load(name):
    return load_split(load_config(["--data.name", str(name)], {}).data, "train")


@pytest.mark.bad_input("a hub name without a network")
def test_a_hub_name_without_a_network_is_refused_after_one_attempt_with_what_to_set(
    no_network, monkeypatch
):
    attempts, connect = [], socket.socket.connect

    def counted(self, address):
        attempts.append(address)
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", counted)
    message = message_of(65, load, "somebody/nothing")
    assert attempts == [("127.0.0.1", 9)], "the hub's library would retry for half a minute"
    said = "data.name=somebody/nothing could not be loaded: Couldn't reach 'somebody/nothing'"
    assert message.startswith(said)
    assert "it is not cached, and the hub is not reached" in message
    assert message.endswith("set data.path to local files")


@pytest.mark.bad_input(
    "a revision in `data.name` that can't be loaded while the cache has another one"
)
def test_without_a_network_a_cached_revision_is_loaded_and_no_other_is_taken_for_it(
    no_network, monkeypatch
):
    """The library would take the newest in the cache, after any error of the hub."""
    # somebody/texts at commit abc, where the library keeps what it got from the hub.
    row = no_network / "rows.jsonl"
    row.write_text('{"text": "kept"}\n')
    datasets.load_dataset("json", data_files=str(row), cache_dir=no_network / "made")
    (made,) = (path.parent for path in (no_network / "made/json").glob("*/*/*/dataset_info.json"))
    kept = no_network / "cache/somebody___texts/default/0.0.0/abc"
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    (kept / "json-train.arrow").rename(kept / "texts-train.arrow")
    refs = no_network / "hub/datasets--somebody--texts/refs"  # what the hub's library knows of v1.0
    refs.mkdir(parents=True)
    (refs / "v1.0").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(no_network / "hub"))
    for revision in ("main", "abc", "v1.0"):
        assert load(f"somebody/texts@{revision}")["text"] == ["kept"]
    message = message_of(65, load, "somebody/texts@v2.0")
    said = "revision v2.0 could not be loaded, and the newest in the cache is commit abc; "
    assert message.startswith(f"data.name=somebody/texts@v2.0: {said}")
    assert message.endswith("or use @abc")
