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
from contextlib import closing

import bad_inputs
import datasets
import pytest
import torch
import torch.nn.functional as F
from byte_model import COMPILED, nothing_compiled_yet  # noqa: F401
from huggingface_hub import constants
from messages import message_of
from ranks import on_ranks
from test_bad_samples import Torn
from test_strangers import Mixture, dtypes_after_a_step
from tiny import Changed, Rows, Tiny, make_run, take_steps, variant
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dist_amp.config.load import load_config
from dist_amp.errors import DataError, Failure
from dist_amp.settings import RunConfig
from dist_amp.sources import files as documents
from dist_amp.sources.load import load_split
from dist_amp.step import evaluate
from dist_amp.supervise import explain
from dist_amp.supervise.explain import explain_error
from dist_amp.supervise.lifecycle import Job
from dist_amp.world import World, start


def test_no_bad_input_has_lost_its_test():
    assert len(bad_inputs.rows()) >= 100
    assert bad_inputs.INDEX.read_text() == bad_inputs.index(), "run python tests/bad_inputs.py"


@pytest.mark.bad_input("a rank that never joins, or another program at its address")
@pytest.mark.bad_input("MASTER_ADDR or MASTER_PORT missing")
@pytest.mark.parametrize(
    ("rank", "host", "listens", "status", "said"),
    [
        (0, "127.0.0.1", None, 1, "rank 1 of 2 has not joined at {} within run.timeout_seconds=1"),
        (1, "127.0.0.1", None, 1, "no rank 0 at {} within run.timeout_seconds=1 (no answer"),
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


class ManyAtOnce(Rows):
    """As a dataset of the `datasets` library reads; one row can't be read."""

    def __getitems__(self, indices):
        if 17 in indices:
            raise OSError("bad sector\nin some detail")
        return [self[index] for index in indices]


# Set once the batches before it have arrived: torch reports their loss otherwise.
received = multiprocessing.get_context("fork").Event()


class Killed(Rows):
    """A row that kills its worker, as one too large for the memory does."""

    def __getitem__(self, index):
        if index == 17:
            received.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


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
        return Rows(**columns, counts=torch.ones(64))

    def loss_sum(self, model, batch):
        return F.cross_entropy(model(batch["token"]).float(), batch["label"], reduction="sum")


def five_steps(run):
    return take_steps(run, 5)


def run_of(task, *words):
    return make_run(World(), task, *IN_ORDER, "--eval.every", 1, *words)


def explained_on_rank_3(error, run=None):
    return explain_error(error, Job(None, World(3), run=run))


def explained(run, call):
    """What the error of a call becomes, on rank 3."""
    with closing(run.data), pytest.raises(Exception) as caught:  # noqa: PT011 (whatever torch raises)
        call(run)
    return explained_on_rank_3(caught.value, run)


BROKEN = Torn(64, unreadable=(17,), odd=())
UNREAD = r"could not be read: OSError: bad sector.* \(test_bad_.*\); fix or remove it$"
RAGGED = r"rank 0: samples 16, 17, 18, 19 of the training split do not make one batch: x is Tensor "
RAGGED += r"\[9\] in sample 18, Tensor \[8\] in the first: RuntimeError.* the same keys, shapes and"
RANGE = "rank 3: a token id or label is out of range in samples 12, 13, 14, 15 of the"
INDEX = "index out of range in self; "
OTHER_KEY = r"rank 3: the task looks for 'input' in a batch that has x, y, counts \(KeyError: "
IN_ORDER = ["--train.micro_batch_size", 4, "--data.shuffle", "false"]
ONE_WORKER = ["--data.workers", 1]
IN_FOUR = ["--train.accumulation_steps", 4]


@pytest.mark.bad_input("a corrupt file, row, image; a token id or label out of range")
@pytest.mark.bad_input("samples that can't be collated into a batch")
@pytest.mark.bad_input("samples with a column that is missing, None, or of another type or length")
@pytest.mark.bad_input("a key that a batch does not have, in `loss_sum`, `weight` or `metrics`")
@pytest.mark.parametrize(
    ("task", "words", "call", "said"),
    [
        (BROKEN, [], five_steps, f"rank 0: sample 17 of the training split {UNREAD}"),
        (BROKEN, ONE_WORKER, evaluate, f"sample 17 of the validation split {UNREAD}"),
        (variant(rows=ManyAtOnce), [], evaluate, f"sample 17 of the validation split {UNREAD}"),
        (variant(rows=ManyAtOnce), ONE_WORKER, five_steps, f"17 of the training split {UNREAD}"),
        (Torn(64, unreadable=(), odd=(18,)), ONE_WORKER, five_steps, RAGGED),
        (Classes(token=10), IN_FOUR, five_steps, f"{RANGE} training split: {INDEX}"),
        (Classes(token=10), [], evaluate, f"{RANGE} validation split: {INDEX}"),
        (Classes(label=9), [], five_steps, f"{RANGE} training split: Target 9 is out of bounds.; "),
        (variant(loss_sum=lambda m, b: m(b["input"]).sum()), [], five_steps, OTHER_KEY),
    ],
)
def test_the_samples_that_a_step_fails_on_are_named(task, words, call, said):
    error = explained(run_of(task, *words), call)
    assert isinstance(error, DataError)
    assert re.search(said, str(error)), error
    assert "\n" not in str(error)


def test_a_sample_that_one_rank_cannot_read_ends_the_job_in_one_line_that_names_both(
    launch, tmp_path
):
    words = [*IN_ORDER, *ONE_WORKER, "--run.dir", tmp_path, "--task.target"]
    words += ["test_bad_samples:Torn", "--task.args.samples", 64]
    words += ["--task.args.unreadable", 17, "--task.args.odd", 63]
    done = launch.each(2, *words)
    errors = "".join(rank.stderr for rank in done)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_code"] == 65
    said = "rank 1: sample 17 of the training split could not be read: OSError: bad sector"
    assert summary["cause"].startswith(said)
    assert errors.splitlines().count(f"error: {summary['cause']}") == 1
    assert "rank 1: Traceback" not in errors


def test_an_index_out_of_range_on_a_gpu_is_explained_and_another_error_stays_what_it_is():
    text = "CUDA error: device-side assert triggered\nCUDA kernel errors might be"
    said = "rank 3: the GPU stopped at a device-side assert, typically a token id or label"
    assert str(explained_on_rank_3(RuntimeError(text))).startswith(said)
    run = run_of(Classes())
    take_steps(run, 1)
    assert isinstance(explained(run, lambda _: nn.Embedding(2, 2)(torch.tensor([2]))), IndexError)
    assert isinstance(explained(run, lambda _: [].pop()), IndexError)
    other = RuntimeError("DataLoader timed out")
    assert explained_on_rank_3(other) is other


@pytest.mark.bad_input("a loader worker killed")
def test_a_loader_worker_that_is_killed_is_named_with_rank_and_signal():
    run = run_of(variant(rows=Killed), *ONE_WORKER)
    take_steps(run, 4)
    (worker,) = run.data._batches._workers
    received.set()
    error = explained(run, five_steps)
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
    run = run_of(Tiny(), *ONE_WORKER)
    run.data.fetch.collate = lambda samples: Unsendable()
    error = explained(run, five_steps)  # and not a wait for ever
    assert "exit code 24; the dataset's or the task's code ended it" in str(error)
    assert "a batch can't be sent: OSError: [Errno 24] Too many" in capfd.readouterr().err


# ---- a loss under FSDP2 or compiled, and a GPU's memory ----


class GradientPenalty(Tiny):
    def loss_sum(self, model, batch):
        x = batch["x"].clone().requires_grad_(True)
        output = model(x).float().squeeze(-1)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.mse_loss(output, batch["y"], reduction="sum") + slope.float().square().sum()


class ParameterPenalty(Tiny):
    def loss_sum(self, model, batch):
        penalty = sum(p.square().sum() for p in model.parameters())
        return super().loss_sum(model, batch) + 1e-2 * len(batch["y"]) * penalty


def add_teacher(model):
    model.register_buffer("teacher", torch.randn(8, 8))
    model.register_forward_pre_hook(lambda _, args: (args[0] - F.linear(args[0], model.teacher),))


EVERY = ("parallel.accumulate_reduce", "every")
HAS_SETTING = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
TORCH_2_11 = pytest.mark.skipif(not HAS_SETTING, reason="zeros are reduced here")


def explanation(world, task, *words):
    """The line for the error of a step."""
    run = make_run(world, task, *words)
    with pytest.raises((AssertionError, RuntimeError)) as error:
        take_steps(run, 4)
    explained = explain_error(error.value, Job(run.config, world, run=run))
    assert isinstance(explained, Failure)
    return str(explained)


@pytest.mark.bad_input("a gradient penalty, or a penalty on parameters, under fsdp")
@pytest.mark.bad_input("buffers that FSDP2's policy does not cast to the model's dtype")
@pytest.mark.bad_input("idle experts under fsdp's policy with accumulation")
@pytest.mark.parametrize(
    ("task", "said", "setting", "value"),
    [
        (GradientPenalty(), "twice (create_graph), as a gradient pen", "parallel.strategy", "ddp"),
        (ParameterPenalty(), "are shards, which can neither be copied", "parallel.strategy", "ddp"),
        (Changed(add_teacher), "inputs, but not buffers (Runt", "precision.cast_by", "autocast"),
        pytest.param(Mixture(24), "some of the step's micro-batches", *EVERY, marks=TORCH_2_11),
    ],
)
def test_what_sharding_rules_out_is_explained_and_works_as_it_says(task, said, setting, value):
    words = "--parallel.strategy fsdp --train.accumulation_steps 2 --train.micro_batch_size 2"
    words = [*words.split(), "--data.shuffle", "false"]
    for message in on_ranks(2, explanation, task, *words):
        assert said in message
        assert f"{setting}={value}" in message
    on_ranks(2, dtypes_after_a_step, task, *words, f"--{setting}", value)


@pytest.mark.bad_input("a loss that differentiates twice, with compiled blocks")
def test_a_loss_that_differentiates_compiled_blocks_twice_is_told_to_leave_them_as_they_are():
    message = explanation(World(), GradientPenalty(), *COMPILED, "--use_amp", "false")
    assert message.startswith("rank 0: the loss differentiates twice (create_graph)")
    assert "use compile.blocks=false" in message


GIB = 2**30
LESS = "a train.micro_batch_size below 4 (with more train.accumulation_steps), or "
LESS += "parallel.activation_checkpointing=selective or full, or a smaller model"
SHARDS = "parallel.strategy=fsdp, or a smaller model"
FULL = ["--parallel.activation_checkpointing", "full", "--train.micro_batch_size", 1]


@pytest.mark.parametrize(("ranks", "words", "expected"), [(1, [], LESS), (8, FULL, SHARDS)])
def test_the_line_has_the_request_what_the_model_takes_and_the_settings_that_take_less(
    monkeypatch, ranks, words, expected
):
    monkeypatch.setattr(explain, "capacity_of", lambda world: (79 * GIB, 9 * GIB))
    monkeypatch.setattr(explain, "memory_use", lambda device: (78 * GIB,))
    run = make_run(World(), Tiny(), "--train.micro_batch_size", 4, *words)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    world = World(min(3, ranks - 1), 0, ranks, ranks, torch.device("cuda", 0))
    text = str(explain_error(error, Job(run.config, world, run=run)))
    assert text.startswith(f"rank {world.rank} ran out of GPU memory in step 1: asked for 2.00 GiB")
    assert "78.00 GiB in use, of 79.00 GiB available; parameters take 612 bytes, grad" in text
    fragments = "use PYTORCH_ALLOC_CONF=expandable_segments:True in the environment (9.00 GiB are "
    assert text.endswith(f"{fragments}reserved but fragmented), or {expected}")


# ---- the hub ----


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Where the hub should be, nobody answers; and its library may yet try."""
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
    assert "it is not cached, and the hub is unreachable" in message
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
    for revision in ("main", "abc"):
        assert load(f"somebody/texts@{revision}")["text"] == ["kept"]
    message = message_of(65, load, "somebody/texts@v2.0")
    said = "revision v2.0 could not be loaded, and the newest in the cache is commit abc; "
    assert message.startswith(f"data.name=somebody/texts@v2.0: {said}")
    assert message.endswith("or use @abc")
