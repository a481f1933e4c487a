"""The next step's micro-batches are copied on a stream of their own while this one computes, never
two steps ahead.
"""

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import Tiny, make_run
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dist_amp import data
from dist_amp.data import Batches, DeviceCopies, Padding
from dist_amp.errors import DataError
from dist_amp.loading.nested import plain_mappings, tensors, to_device
from dist_amp.loading.plan import Plan
from dist_amp.world import World

META = torch.device(
    "meta"
)  # stands in for a GPU: a device without values, to which copies are made as to any other


class RecordedCuda:
    """Stands in for torch.cuda: its streams and events write down what is done with them, in order."""

    def __init__(self):
        self.log = []
        self.compute = RecordedStream(self, "compute")

    def Stream(self, device):
        return RecordedStream(self, "side")

    def stream(self, stream):
        return stream

    def current_stream(self, device):
        return self.compute

    def Event(self, blocking=False):
        return RecordedEvent(self)


class RecordedStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def __enter__(self):
        self.cuda.log.append(("enter", self.name))

    def __exit__(self, *error):
        self.cuda.log.append(("exit", self.name))

    def wait_event(self, event):
        self.cuda.log.append(("wait_event", self.name, event.number))


class RecordedEvent:
    def __init__(self, cuda):
        self.cuda, self.number = cuda, None

    def record(self, stream):
        self.number = sum(one[0] == "record" for one in self.cuda.log)
        self.cuda.log.append(("record", stream.name, self.number))

    def synchronize(self):
        self.cuda.log.append(("host waits for", self.number))


@pytest.fixture
def cuda(monkeypatch):
    """Streams and events are recorded, and so is each copy and each tensor's `record_stream`."""
    cuda = RecordedCuda()
    real = data.to_device

    def copied(batch, device):
        cuda.log.append(("copy", batch["index"].tolist()))
        return real(batch, device)

    monkeypatch.setattr(data, "to_device", copied)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: cuda.log.append(("record_stream", stream.name)),
    )
    return cuda


class Indexed:
    """Samples that are their own index; more than one tensor per sample, and one that can't be
    read.
    """

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


def on_device(cuda, workers=1, dataset=None, accumulation=2, position=0):
    dataset = dataset or Indexed()
    plan = Plan(len(dataset), 2 * accumulation, 2, 1, 0, 0, "dataset")
    one = Batches(dataset, Words(), plan, workers, META)
    one._copies = DeviceCopies(META, cuda)
    one.position = position
    return one


def steps_of_loop(one, steps):
    """What the training loop does: take a step's micro-batches, launch its kernels, prefetch the
    next.
    """
    log = one._copies._cuda.log
    for step in range(steps):
        next(one)
        log.append(("kernels", step))
        one.prefetch()
    one.close()


def test_the_copy_of_the_next_step_is_queued_on_its_own_stream_before_this_step_is_over(cuda):
    steps_of_loop(on_device(cuda), 3)
    log = cuda.log
    copies = [number for number, entry in enumerate(log) if entry[0] == "copy"]
    assert [log[number][1] for number in copies] == [[n, n + 1] for n in range(0, 16, 2)], (
        "in order, each one once"
    )
    for number in copies:
        inside = [entry[0] for entry in log[:number] if entry[0] in ("enter", "exit")]
        assert inside[-1] == "enter", "on the side stream"
    for step in range(2):
        assert (
            log.index(("kernels", step))
            < copies[2 * step + 2]
            < copies[2 * step + 3]
            < log.index(("kernels", step + 1))
        )


def test_the_kernels_of_a_step_wait_for_its_copy_and_for_no_other(cuda):
    steps_of_loop(on_device(cuda), 3)
    arrivals = [entry[2] for entry in cuda.log if entry[:2] == ("record", "side")]
    waits = [entry for entry in cuda.log if entry[0] == "wait_event"]
    assert waits == [("wait_event", "compute", number) for number in arrivals[:3]]
    for step in range(3):
        assert cuda.log.index(waits[step]) < cuda.log.index(("kernels", step))
        assert cuda.log.index(("record", "side", arrivals[step])) < cuda.log.index(waits[step])


def test_each_tensor_is_recorded_on_the_stream_that_uses_it_before_the_kernels(cuda):
    steps_of_loop(on_device(cuda), 2)
    before = cuda.log[: cuda.log.index(("kernels", 0))]
    # Two micro-batches of three tensors each: index and the two nested ones.
    assert before.count(("record_stream", "compute")) == 6
    assert before.index(("record_stream", "compute")) > before.index(("wait_event", "compute", 0))


def test_no_copy_begins_before_the_device_has_finished_the_step_before_the_last(cuda):
    steps_of_loop(on_device(cuda), 4)
    log = cuda.log
    begun = [
        entry[2] for entry in log if entry[:2] == ("record", "compute")
    ]  # before the kernels of step 0, 1, 2, ...
    waits = [entry[1] for entry in log if entry[0] == "host waits for"]
    # The copy of step n + 1 waits for all that was queued before step n: two steps' micro-batches
    # at any time.
    assert waits == begun
    for step, event in enumerate(begun):
        wait, copy = (
            log.index(("host waits for", event)),
            log.index(("copy", [4 * step + 4, 4 * step + 5])),
        )
        assert log.index(("kernels", step)) < wait < copy


def test_prefetching_twice_or_not_at_all_takes_the_same_steps(cuda):
    def steps(prefetches):
        one = on_device(cuda)
        taken = []
        for _ in range(5):
            next(one)
            taken.append([indices for _, indices in one.last_step])
            for _ in range(prefetches):
                one.prefetch()
        one.close()
        return taken

    assert (
        steps(0) == steps(1) == steps(2) == [[(n, n + 1), (n + 2, n + 3)] for n in range(0, 20, 4)]
    )


def test_position_and_counts_are_those_of_the_step_handed_out(cuda):
    one = on_device(cuda)
    next(one)
    before = (one.position, one.items, one.tokens, one.last_step)
    one.prefetch()
    assert before == (one.position, one.items, one.tokens, one.last_step)
    assert before[:3] == (4, 4, 40)
    assert one._clock.so_far()["data"] > 0
    resumed = on_device(cuda, position=one.position)  # a checkpoint taken now
    next(one)
    next(resumed)
    assert [indices for _, indices in one.last_step] == [
        indices for _, indices in resumed.last_step
    ]
    one.close()
    resumed.close()


def test_an_error_of_the_step_ahead_is_raised_by_that_step(cuda):
    one = on_device(cuda, dataset=Indexed(broken=5))
    next(one)
    one.prefetch()
    one.prefetch()
    with pytest.raises(
        DataError, match="sample 5 of the training split could not be read: ValueError: torn"
    ):
        next(one)
    one.close()


def test_samples_read_in_this_process_are_not_read_ahead(cuda):
    one = on_device(cuda, workers=0)
    next(one)
    before = len(cuda.log)
    one.prefetch()
    assert len(cuda.log) == before, (
        "their random numbers would come before the dropout of this step"
    )


def test_on_a_cpu_there_is_no_stream_and_nothing_is_fetched_ahead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", None)
    run = make_run(World(), Tiny(), "--data.workers", 1)
    next(run.data)
    run.data.prefetch()
    assert run.data._ahead is None
    run.data.close()


def test_padding_is_copied_and_counts_for_nothing(cuda):
    one = Batches(Indexed(2), Words(), Plan(2, 8, 4, 2, 1, 0, "dataset"), 0, META)
    one._copies = DeviceCopies(META, cuda)
    (step,) = next(one)
    assert isinstance(step, Padding)
    assert (one.items, one.tokens, step.batch["index"].device.type) == (0, 0, "meta")


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
    def __init__(self, **own):
        vars(self).update(own)


def x():
    return torch.zeros(2)


def nested():
    return {
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


def test_a_batch_of_any_structure_is_moved_and_keeps_its_classes():
    before = nested()
    assert len(list(tensors(before))) == 11
    moved = to_device(before, META)
    assert {name: type(part) for name, part in moved.items()} == {
        name: type(part) for name, part in before.items()
    }
    elsewhere = [tensor for tensor in tensors(moved) if tensor.device != META]
    assert len(elsewhere) == 1
    assert elsewhere[0] is moved["packed"].batch_sizes, "torch wants it on the CPU"
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["encoding"].input_ids.device == moved["graph"].edges["index"][0].device == META
    assert (moved["graph"].name, moved["pair"].second, moved["encoding"].names) == (
        "g",
        "text",
        ["a"],
    )
    assert before["graph"].nodes.device.type == before["encoding"].input_ids.device.type == "cpu"


@pytest.mark.bad_input(
    "on a GPU, a batch with an object that holds tensors and has no `to(device)`"
)
def test_an_object_with_a_tensor_that_can_not_be_moved_is_refused_by_name():
    for holder in (Opaque(x=x()), Opaque(text="", x=[Opaque(deep=x())])):
        with pytest.raises(
            DataError,
            match=r"holds a Opaque whose x has a tensor that can't be moved to meta; give",
        ):
            to_device({"a": [holder]}, META)
        assert to_device(holder, torch.device("cpu")) is holder, "it is there already"
    assert to_device(Opaque(x=torch.zeros(1, device=META)), META).x.device == META


def test_an_object_that_refers_to_itself_is_looked_through_once():
    one = Opaque(text="no tensor")
    one.own = [one]
    assert to_device(one, META) is one


@pytest.mark.bad_input("a batch with an object whose `to(device)` fails")
def test_an_object_whose_to_fails_is_named():
    class Fails:
        def to(self, device, non_blocking=False):
            raise RuntimeError("no kernel")

    with pytest.raises(
        DataError, match=r"a batch holds a Fails whose to\('meta'\) failed: RuntimeError: no kernel"
    ):
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
def test_on_a_gpu_the_same_batches_arrive_from_pinned_memory(workers):
    here = SimpleNamespace(cpu=World(), gpu=replace(World(), device=torch.device("cuda", 0)))
    expected, run = (
        make_run(world, Tiny(), "--data.workers", workers) for world in vars(here).values()
    )
    for _ in range(6):
        (ours,), (theirs,) = next(run.data), next(expected.data)
        run.data.prefetch()
        assert ours["x"].is_cuda
        assert torch.equal(ours["x"].cpu(), theirs["x"])
    run.data.close()
    expected.data.close()
