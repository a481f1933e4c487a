"""The next step's micro-batches are copied on a stream of their own while this one computes, never
two steps ahead; whatever they are made of.
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import Tiny, make_run
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dist_amp import data
from dist_amp.data import Batches, Padding
from dist_amp.errors import DataError
from dist_amp.loading.nested import plain_mappings, tensors, to_device
from dist_amp.loading.plan import Plan
from dist_amp.world import World

# Stands in for a GPU: a device without values, to which copies are made as to any other.
META = torch.device("meta")


class RecordedStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(("enter", self.name))

    def __exit__(self, *error):
        self.log.append(("exit", self.name))

    def wait_event(self, event):
        self.log.append(("wait_event", self.name, event.number))


class RecordedEvent:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.number = sum(one[0] == "record" for one in self.log)
        self.log.append(("record", stream.name, self.number))

    def synchronize(self):
        self.log.append(("host waits for", self.number))


@pytest.fixture
def log(monkeypatch):
    """What is done with streams and events, each copy, and each tensor's `record_stream`."""
    log = []
    compute = RecordedStream(log, "compute")

    def copied(batch, device):
        log.append(("copy", batch["index"].tolist()))
        return to_device(batch, device)

    def recorded(tensor, stream):
        log.append(("record_stream", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: RecordedStream(log, "side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: RecordedEvent(log))
    monkeypatch.setattr(data, "to_device", copied)
    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    return log


class Indexed:
    """Samples that are their own index, of three tensors; one can't be read."""

    def __init__(self, length=40, broken=None):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError("torn")
        return {"index": index, "nested": [torch.zeros(2), (torch.ones(1), "text")]}


class Words:
    def tokens(self, batch):
        return 10 * len(batch["index"])


def on_device(workers=1, dataset=None, position=0):
    dataset = dataset or Indexed()
    plan = Plan(len(dataset), 4, 2, 1, 0, 0, "dataset")
    batches = Batches(dataset, Words(), plan, workers, META)
    batches.position = position
    return batches


def test_each_copy_overlaps_the_step_before_and_waits_for_what_it_must(log):
    batches = on_device()
    for step in range(4):  # as the training loop does
        next(batches)
        log.append(("kernels", step))
        batches.prefetch()
    batches.close()
    kernels = [log.index(("kernels", step)) for step in range(4)]
    copies = [place for place, entry in enumerate(log) if entry[0] == "copy"]
    assert [log[place][1] for place in copies] == [[n, n + 1] for n in range(0, 20, 2)]
    for place in copies:
        inside = [entry for entry in log[:place] if entry[0] in ("enter", "exit")]
        assert inside[-1] == ("enter", "side")
    for step in range(3):  # the next step's copies are queued while this one computes
        assert kernels[step] < copies[2 * step + 2] < copies[2 * step + 3] < kernels[step + 1]
    arrivals = [entry[2] for entry in log if entry[:2] == ("record", "side")]
    waits = [entry for entry in log if entry[0] == "wait_event"]
    assert waits == [("wait_event", "compute", number) for number in arrivals[:4]]
    for step, wait in enumerate(waits):  # kernels wait for their own step's copy
        assert log.index(("record", "side", arrivals[step])) < log.index(wait) < kernels[step]
    first = log[log.index(waits[0]) : kernels[0]]
    assert first.count(("record_stream", "compute")) == 6, "two micro-batches of three tensors"
    # The copy of step n + 1 waits for all that was queued before step n.
    begun = [entry[2] for entry in log if entry[:2] == ("record", "compute")]
    assert [entry[1] for entry in log if entry[0] == "host waits for"] == begun
    for step, event in enumerate(begun):
        waited = log.index(("host waits for", event))
        assert kernels[step] < waited < log.index(("copy", [4 * step + 4, 4 * step + 5]))


@pytest.mark.parametrize("prefetches", [0, 1, 2])
def test_position_counts_and_samples_are_those_of_the_step_returned(log, prefetches):
    batches = on_device()
    for step in range(5):
        next(batches)
        for _ in range(prefetches):
            batches.prefetch()
        n = 4 * step
        assert [indices for _, indices in batches.last_step] == [(n, n + 1), (n + 2, n + 3)]
        assert (batches.position, batches.items, batches.tokens) == (n + 4, n + 4, 10 * (n + 4))
    batches.close()
    assert batches._clock.so_far()["data"] > 0
    resumed = on_device(workers=0, position=8)  # of a checkpoint taken after the second step
    next(resumed)
    assert resumed.last_step[0][1] == (8, 9)


def test_an_error_of_the_step_ahead_is_raised_by_that_step(log):
    batches = on_device(dataset=Indexed(broken=5))
    next(batches)
    batches.prefetch()
    batches.prefetch()
    text = "sample 5 of the training split could not be read: ValueError: torn"
    with pytest.raises(DataError, match=text):
        next(batches)
    batches.close()


def test_on_a_cpu_or_in_this_process_nothing_is_fetched_ahead(log):
    batches = on_device(workers=0)
    next(batches)
    before = len(log)
    batches.prefetch()
    assert len(log) == before, "its random numbers would come before the dropout of this step"
    run = make_run(World(), Tiny(), "--data.workers", 1)
    next(run.data)
    run.data.prefetch()
    assert len(log) == before
    assert run.data.position == 8
    run.data.close()


def test_padding_is_copied_and_counts_for_nothing(log):
    batches = Batches(Indexed(2), Words(), Plan(2, 8, 4, 2, 1, 0, "dataset"), 0, META)
    (padding,) = next(batches)
    assert isinstance(padding, Padding)
    assert (batches.items, batches.tokens, padding.batch["index"].device.type) == (0, 0, "meta")


def test_the_loop_prefetches_after_each_step_but_the_last(monkeypatch, tmp_path):
    from dist_amp.supervise.stop import AgreedStop
    from dist_amp.train import train

    run = make_run(World(), Tiny(), "--train.steps", 4, "--run.dir", tmp_path)
    calls = []
    monkeypatch.setattr(run.data, "prefetch", lambda: calls.append(run.step))
    with AgreedStop(World()) as stop:
        train(run, stop)
    assert calls == [1, 2, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_the_same_batches_arrive(workers):
    gpu = replace(World(), device=torch.device("cuda", 0))
    run, expected = (make_run(w, Tiny(), "--data.workers", workers) for w in (gpu, World()))
    for _ in range(6):
        (on_gpu,), (on_cpu,) = next(run.data), next(expected.data)
        run.data.prefetch()
        assert on_gpu["x"].is_cuda
        assert torch.equal(on_gpu["x"].cpu(), on_cpu["x"])
    run.data.close()
    expected.data.close()


# ---- batches of any structure ----

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    edges: dict
    name: str = "g"


@dataclass
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


class Encoding(UserDict):
    """As transformers' BatchEncoding: its entries are attributes too."""

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Movable:
    """As a graph library's batch, with a `to` that knows no non_blocking."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Movable(self.x.to(device))


class InPlace(Movable):
    def to(self, device, non_blocking=False):
        self.x = self.x.to(device)


class Opaque:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def x():
    return torch.zeros(2)


def test_a_batch_of_any_structure_is_moved_and_keeps_its_classes():
    before = {
        "tuple": (x(), [x(), 3]),
        "pair": Pair(x(), "text"),
        "graph": Graph(x(), {"index": [x()]}),
        "slotted": Slotted(x()),
        "encoding": Encoding(input_ids=x(), names=["a"]),
        "movable": Movable(x()),
        "in_place": InPlace(x()),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "opaque": Opaque(text="no tensor"),
    }
    assert len(list(tensors(before))) == 11
    moved = to_device(before, META)
    assert list(map(type, moved.values())) == list(map(type, before.values()))
    elsewhere = [tensor for tensor in tensors(moved) if tensor.device != META]
    assert len(elsewhere) == 1
    assert elsewhere[0] is moved["packed"].batch_sizes, "torch wants it on the CPU"
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["encoding"].input_ids.device == moved["graph"].edges["index"][0].device == META
    texts = (moved["graph"].name, moved["pair"].second, moved["encoding"].names)
    assert texts == ("g", "text", ["a"])
    assert before["graph"].nodes.device.type == before["encoding"].input_ids.device.type == "cpu"


@pytest.mark.bad_input(
    "on a GPU, a batch with an object that holds tensors and has no `to(device)`"
)
def test_a_gpu_copies_from_pinned_memory_whoever_read_the_batch(monkeypatch):
    pinned, copied = [], []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: any(tensor is p for p in pinned))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: copied.append(tensor))
    by_a_worker = pin(torch.zeros(1))
    to_device({"x": torch.ones(2), "y": [by_a_worker]}, torch.device("cuda"))
    assert [id(tensor) for tensor in copied] == [id(pinned[1]), id(by_a_worker)]


def test_an_object_with_a_tensor_that_can_not_be_moved_is_refused_by_name():
    text = "holds a Opaque whose x has a tensor that can't be moved to meta; give"
    for holder in (Opaque(x=x()), Opaque(text="", x=[Opaque(deep=x())])):
        with pytest.raises(DataError, match=text):
            to_device({"a": [holder]}, META)
        assert to_device(holder, torch.device("cpu")) is holder, "it is there already"
    assert to_device(Opaque(x=torch.zeros(1, device=META)), META).x.device == META
    refers_to_itself = Opaque(text="no tensor")
    refers_to_itself.parts = [refers_to_itself]
    assert to_device(refers_to_itself, META) is refers_to_itself


@pytest.mark.bad_input("a batch with an object whose `to(device)` fails")
def test_an_object_whose_to_fails_is_named():
    class Fails:
        def to(self, device, non_blocking=False):
            raise RuntimeError("no kernel")

    text = r"a batch holds a Fails whose to\('meta'\) failed: RuntimeError: no kernel"
    with pytest.raises(DataError, match=text):
        to_device(Fails(), META)


def test_transformers_batches_are_moved_as_what_they_are():
    transformers = pytest.importorskip("transformers")
    moved = to_device(transformers.BatchEncoding({"input_ids": x()}), META)
    assert isinstance(moved, transformers.BatchEncoding)
    assert moved.input_ids.device == META
    output = to_device(transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x()), META)
    assert output.last_hidden_state.device == output["last_hidden_state"].device == META


def test_what_is_kept_for_a_replay_holds_plain_dicts():
    kept = plain_mappings({"a": [Encoding(b=1)], "c": (Encoding(d=2),)})
    assert kept == {"a": [{"b": 1}], "c": ({"d": 2},)}
    assert type(kept["a"][0]) is dict


class OfObjects(Tiny):
    """Batches that are objects with attributes, in place of dicts."""

    def collate(self, samples):
        return Encoding(torch.utils.data.default_collate(samples))

    def loss_sum(self, model, batch):
        return super().loss_sum(model, {"x": batch.x, "y": batch.y, "counts": batch.counts})


def test_the_main_job_trains_on_objects_and_compares_their_samples_between_ranks():
    from dist_amp.diagnostics.consistency import hash_samples
    from dist_amp.step import train_step

    run = make_run(World(), OfObjects(), "--data.workers", 1)
    first, second = next(run.data), next(run.data)
    assert hash_samples(first, run.world.device) != hash_samples(second, run.world.device)
    assert hash_samples([Padding(first[0])], run.world.device) == 0
    assert train_step(run, first).applied
    run.data.close()
