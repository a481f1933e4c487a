"""A skipped step is replayed, and its first inf or nan is named; the replay changes nothing."""

import json

import pytest
import torch
from ranks import on_ranks
from test_step import HostReads
from tiny import Overflow, Rows, Tiny, log, make_run, moments_of, parameters_of
from torch import nn

from dist_amp.diagnostics.nonfinite import MAX_FILES, NonfiniteReplay
from dist_amp.errors import ConfigError, DataError
from dist_amp.step import train_step
from dist_amp.telemetry.step_report import Observer
from dist_amp.verify.replay import replay_file
from dist_amp.world import World

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]
FP32 = ["--use_amp", "false"]
FP16 = ["--precision.dtype", "fp16"]
IN_ORDER = ["--data.shuffle", "false", "--train.micro_batch_size", 2]


class LogOf(nn.Module):
    """Takes a logarithm before a layer: finite in, nan out; the layer is not to blame."""

    def __init__(self):
        super().__init__()
        self.after = nn.Linear(8, 8)

    def forward(self, x):
        return self.after(x.log())


class RootOf(nn.Module):
    """Finite forward; at zero the root's gradient is infinite."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)

    def forward(self, x):
        return (self.before(x) * 0.0).sqrt_()


class Made(Tiny):
    """Tiny with one of this file's modules, `kind`, as model[1]."""

    def __init__(self, kind: str = "LogOf"):
        super().__init__(samples=32)
        self.kind = kind

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), globals()[self.kind](), nn.Linear(8, 1))


class InPlaceRoot(nn.Module):
    def forward(self, x):
        return x.mul_(0.0).sqrt_()


class Twice(nn.Module):
    """One layer called twice; the second call's output is too large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        return self.layer(self.layer(x) * 0.0 + 3e38)


class HarmlessRoot(nn.Module):
    """Its infinite gradient becomes zero in the ReLU before it, and spoils nothing."""

    def forward(self, x):
        return (x * 0.0).relu_().sqrt()


class WideMask(nn.Module):
    """Its inner module's -inf is intended, and goes no further."""

    def __init__(self):
        super().__init__()
        self.mask = MinusInf()

    def forward(self, x):
        return self.mask(x).softmax(-1)


class MinusInf(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(8) > 3, -torch.inf)


class Residual(nn.Module):
    """With an in-place module, batch statistics and dropout, which a replay must not change."""

    def __init__(self):
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(8, 8), relu, nn.BatchNorm1d(8), nn.Dropout(0.3))

    def forward(self, x):
        return x + self.inner(x)


class Mixed(Made):
    """Sample 5 is infinite, so that a step in four is skipped."""

    def __init__(self):
        super().__init__("Residual")

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        rows.columns["x"][5] = torch.inf
        return rows


class Large(Tiny):
    """Activations that float16 can't hold."""

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        return Rows(**rows.columns | {"x": rows.columns["x"] * 60_000})


def replayed(world, task, words, folder, steps=1, spoil=None):
    """(what each rank found, its warnings) after `steps` steps and a log step."""
    run = make_run(world, task, *words, "--run.dir", folder)
    warnings = []
    observer = NonfiniteReplay(run)
    object.__setattr__(run.world, "warn", warnings.append)
    if spoil:
        spoil(run)
    try:
        for _ in range(steps):
            micro_batches = next(run.data)
            report = train_step(run, micro_batches)
            run.metrics.record(report)
            observer.after_step(report, micro_batches)
        observer.on_log(run.metrics.log(run.step, run.schedule, run.scaler, run.data))
    finally:
        object.__delattr__(run.world, "warn")
    return observer.faults, warnings


def replay(ranks, task, words, folder, *more):
    """The fault that all ranks agree on, and rank 0's warnings."""
    results = on_ranks(ranks, replayed, task, words, str(folder), *more)
    assert all(faults == results[0][0] for faults, _ in results)
    faults, warnings = results[0]
    assert len(faults) <= 1
    return (faults[0] if faults else None), warnings


def replayed_each(world, strategy, folder):
    """Of a batch, a forward and a backward that are not finite."""
    words = ["--parallel.strategy", strategy, *IN_ORDER]
    bad_batch = Overflow(bad=(world.world_size - 1,))
    return [
        replayed(world, bad_batch, words, f"{folder}/batch"),
        replayed(world, Made("LogOf"), words, f"{folder}/forward"),
        replayed(world, Made("RootOf"), [*words, *FP32], f"{folder}/backward"),
    ]


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_the_first_inf_or_nan_of_each_kind_is_named(tmp_path, ranks, strategy):
    for name in ("batch", "forward", "backward"):
        (tmp_path / name).mkdir()
    results = on_ranks(ranks, replayed_each, strategy, str(tmp_path))
    for of_rank in results:
        assert [faults for faults, _ in of_rank] == [faults for faults, _ in results[0]]
    batch, forward, backward = ((faults[0], warnings) for faults, warnings in results[0])

    fault, warnings = batch
    assert (fault.phase, fault.step, fault.rank, fault.micro_batch) == ("batch", 1, ranks - 1, 0)
    assert fault.samples == ([0, 1] if ranks == 1 else [1, 3])
    assert str(fault.tensors[0]).startswith("batch['x'] fp32 [2, 8] has 8 inf, finite part -")
    kept = tmp_path / f"batch/nonfinite/step_00000001_rank{fault.rank:05d}.pt"
    command = f"python -m dist_amp.verify --replay {kept}"
    assert warnings == [f"step 1 was skipped: on {fault}; kept in {kept}; {command}"]
    assert "the batch itself, first used by 0.0 (Linear)" in warnings[0]
    line = json.loads((tmp_path / "batch/nonfinite/reports.jsonl").read_text())
    assert (line["step"], line["rank"], line["phase"]) == (1, ranks - 1, "batch")

    fault, warnings = forward
    assert (fault.phase, fault.module, fault.module_class) == ("forward", "1", "LogOf")
    assert (fault.rank, fault.other_ranks) == (0, list(range(1, ranks)))
    output, given = fault.tensors
    assert (output.what, output.dtype, output.shape, output.nan) == ("output", "bf16", [2, 8], 16)
    assert (given.what, given.dtype, given.finite) == ("input", "bf16", True)
    assert given.span[0] < 0 < given.span[1]
    said = "forward of 1 (LogOf): output bf16 [2, 8] has 16 nan, nothing finite; input bf16"
    assert said in warnings[0]

    fault, warnings = backward
    assert (fault.phase, fault.module, fault.operation) == ("backward", "1", "SqrtBackward0")
    finite = {tensor.what: tensor.finite for tensor in fault.tensors}
    assert [what for what in finite if not finite[what]] == ["gradient passed on"]
    assert len(finite) > 1
    assert "backward of 1 (RootOf), in SqrtBackward0: gradient passed on fp32" in warnings[0]


def test_a_rank_without_a_sample_takes_part_in_the_replay(tmp_path):
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    words += ["--train.micro_batch_size", 1, "--train.accumulation_steps", 2]
    fault, _ = replay(2, Overflow(bad=(4,), samples=7), words, tmp_path, 2)
    assert (fault.step, fault.rank, fault.micro_batch, fault.samples) == (2, 0, 0, [4])
    assert fault.other_ranks == [1], "padding repeats the same sample, and 0 x nan is nan"


def fault_in(world_words, module, folder):
    (fault,), _ = replayed(World(), Made(module), [*world_words, *IN_ORDER], str(folder))
    return fault


def test_in_place_operations_and_repeated_calls_are_distinguished(tmp_path):
    fault = fault_in(FP32, "InPlaceRoot", tmp_path)
    assert (fault.phase, fault.module, fault.operation) == ("backward", "1", "SqrtBackward0")
    fault = fault_in(FP32, "Twice", tmp_path)
    found = (fault.phase, fault.module, fault.module_class)
    assert found == ("forward", "1.layer", "Linear, call 2")


def infinite_loss(run):
    loss_sum = run.task.loss_sum
    run.task.loss_sum = lambda model, batch: loss_sum(model, batch) * torch.inf


def infinite_norm(run):
    global_grad_norm = run.parallel.global_grad_norm
    run.parallel.global_grad_norm = lambda *args: global_grad_norm(*args) * torch.inf


def test_an_infinity_that_goes_no_further_is_not_blamed(tmp_path):
    words = [*FP32, *IN_ORDER]
    folder = str(tmp_path)
    (fault,), (warning,) = replayed(World(), Made("WideMask"), words, folder, 1, infinite_loss)
    assert (fault.phase, fault.module) == ("loss", "the task's loss_sum")
    assert "the task's loss_sum: loss fp32 [] has 1 inf, nothing finite; output" in warning
    for kind in ("HarmlessRoot", "Residual"):
        faults, (warning,) = replayed(World(), Made(kind), words, folder, 1, infinite_norm)
        assert faults == []
        assert "step 1 was skipped, but its replay is finite" in warning
        rule = "debug.nonfinite=step replays with the parameters as they were"
        assert warning.endswith(rule)


def nan_in_the_last_parameter(run):
    from dist_amp.world import local

    part = local(run.parallel.parameters[0])
    if run.world.rank == run.world.world_size - 1:
        with torch.no_grad():
            part[-1] = torch.nan


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_nan_parameter_is_named_wherever_its_shard_is(tmp_path, ranks, strategy):
    words = ["--parallel.strategy", strategy, *IN_ORDER]
    fault, warnings = replay(ranks, Tiny(), words, tmp_path, 1, nan_in_the_last_parameter)
    assert (fault.phase, fault.module, fault.rank) == ("parameters", "0.0", ranks - 1)
    assert fault.tensors[0].what == "0.0.weight"
    assert "the parameters of 0.0 (Linear): 0.0.weight fp32 [8, 8] has 8 nan" in warnings[0]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_fp16_that_overflows_by_the_loss_scale_alone_is_silent(tmp_path, ranks, strategy):
    words = [*FP16, "--precision.scaler.init_scale", 2**40]
    words += ["--parallel.strategy", strategy, *IN_ORDER]
    assert replay(ranks, Tiny(), words, tmp_path, 3) == (None, [])
    assert not (tmp_path / "nonfinite").exists()


def test_activations_beyond_fp16_are_reported(tmp_path):
    (fault,), _ = replayed(World(), Large(), [*FP16, *IN_ORDER], str(tmp_path))
    assert (fault.phase, fault.module) == ("forward", "0.0")
    stats = [(stats.what, stats.dtype, stats.finite) for stats in fault.tensors]
    assert stats == [("output", "fp16", False), ("input", "fp32", True)]


def ended(world, words):
    """The final state of a run, and how many replays found something."""
    run = make_run(world, Mixed(), *words, "--metrics.log_every", 2, "--train.steps", 6)
    observer = Observer()
    if run.config.debug.nonfinite != "off":
        observer = NonfiniteReplay(run)
    for _ in range(6):
        micro_batches = next(run.data)
        report = train_step(run, micro_batches)
        run.metrics.record(report)
        observer.after_step(report, micro_batches)
        if run.step % 2 == 0:
            observer.on_log(run.metrics.log(run.step, run.schedule, run.scaler, run.data))
    buffers = [buffer.clone() for buffer in run.parallel.module.buffers()]
    state = [*parameters_of(run).values(), *moments_of(run), *buffers, torch.get_rng_state()]
    state = [tensor.numpy().tobytes() for tensor in state]
    return len(getattr(observer, "faults", [])), (run.data.position, state)


def ended_each(world, words):
    """{when: `ended`}."""
    return {when: ended(world, [*words, "--debug.nonfinite", when]) for when in WHEN}


WHEN = ("log", "step", "off")


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_a_run_with_replays_ends_bit_identical_to_one_without(tmp_path, ranks, strategy):
    words = ["--parallel.strategy", strategy, *IN_ORDER, "--run.dir", str(tmp_path)]
    # A policy can't be combined with batch statistics.
    words += ["--train.accumulation_steps", 2, "--precision.cast_by", "autocast"]
    for ends in on_ranks(ranks, ended_each, words):
        assert [ends[when][0] > 0 for when in WHEN] == [True, True, False]
        assert ends["log"][1] == ends["step"][1] == ends["off"][1]


def test_a_log_step_without_skips_still_costs_one_read():
    run = make_run(World(), Tiny())
    observer = NonfiniteReplay(run)
    batches = next(run.data)
    with HostReads() as ordinary:
        report = train_step(run, batches)
        run.metrics.record(report)
        observer.after_step(report, batches)
    with HostReads() as logging:
        observer.on_log(log(run))
    assert (ordinary.count, logging.count) == (0, 1)


def test_a_repeated_fault_is_counted_and_not_reported_again(tmp_path):
    words = [*FP32, *IN_ORDER, "--debug.nonfinite", "step"]
    faults, warnings = replayed(World(), Made("LogOf"), words, str(tmp_path), 3)
    assert (len(faults), len(warnings)) == (3, 1)
    reports = (tmp_path / "nonfinite/reports.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in reports]
    assert [(line["step"], line["met"]) for line in lines] == [(1, 1), (2, 2), (3, 3)]
    assert len(list((tmp_path / "nonfinite").glob("*.pt"))) == 1


def test_no_more_than_eight_files_are_kept_and_none_without_a_folder(tmp_path):
    words = [*FP32, *IN_ORDER]
    faults, warnings = replayed(World(), Made("LogOf"), words, str(tmp_path / "never_opened"))
    assert len(faults) == len(warnings) == 1
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "nonfinite"
    folder.mkdir()
    for number in range(MAX_FILES):
        (folder / f"{number}.pt").touch()
    _, warnings = replayed(World(), Made("LogOf"), words, str(tmp_path))
    assert warnings[0].endswith("; 8 micro-batches are kept already")
    assert len(list(folder.glob("*.pt"))) == MAX_FILES


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A file that a two-rank FSDP run kept."""
    folder = tmp_path_factory.mktemp("run")
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    words += ["--task.target", "test_nonfinite:Made", "--task.args.kind", "LogOf"]
    replay(2, Made("LogOf"), words, folder)
    return folder / "nonfinite/step_00000001_rank00000.pt"


def test_the_file_replays_and_names_the_same_module_until_it_is_fixed(kept, capsys):
    assert replay_file(kept) == 0
    out = capsys.readouterr().out
    assert "with the weights that it keeps" in out
    place = "rank 0, micro-batch 0 (samples 0, 2), forward of 1 (LogOf)"
    assert f"not finite: on {place}: output bf16 [2, 8] has" in out
    assert replay_file(kept, ["--task.args.kind", "Residual2"]) == 1
    assert "all is finite in bf16 on cpu; in the run it was on rank 0" in capsys.readouterr().out


class Residual2(LogOf):
    """LogOf, fixed."""

    def forward(self, x):
        return self.after(x.abs().log1p())


class Unexpected:
    """A type that loading must not construct."""


def damaged(kept, path, how):
    content = torch.load(kept, weights_only=True)
    changed = {
        "types": {**content, "batch": {"x": Unexpected()}},
        "task": {
            **content,
            "config": content["config"].replace("test_nonfinite:Made", "gone:Made"),
        },
        "tensors": {"x": torch.ones(1)},
    }
    if how == "other":
        path.write_text("not a tensor in sight")
    elif how == "cut":
        path.write_bytes(kept.read_bytes()[:-200])
    elif how in changed:
        torch.save(changed[how], path)
    return path


FIX = "give a file of RUN/nonfinite"
TYPES = "holds more than tensors, numbers and text (test_nonfinite.Unexpected)"


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("missing", DataError, f"can't be read (No such file or directory); {FIX}"),
        ("other", DataError, f"is not a kept micro-batch; {FIX}"),
        ("tensors", DataError, f"is not a kept micro-batch; {FIX}"),
        ("cut", DataError, "is cut short"),
        ("types", DataError, TYPES),
        ("task", ConfigError, "there is no module gone"),
    ],
)
def test_a_bad_file_is_rejected_in_one_line_that_names_it(kept, tmp_path, how, error, words):
    path = damaged(kept, tmp_path / "file.pt", how)
    with pytest.raises(error) as rejected:
        replay_file(path)
    assert words in str(rejected.value)
    assert str(path) in str(rejected.value)
    assert "\n" not in str(rejected.value)


def test_the_error_that_ends_the_run_names_where_the_skips_began(launch, tmp_path):
    words = ["--task.target", "test_nonfinite:Made", *map(str, IN_ORDER)]
    words += ["--metrics.log_every", "2", "--train.max_skips_in_a_row", "4", "--eval.every", "off"]
    done = launch.each(2, *words, "--run.dir", "run")
    errors = "".join(rank.stderr for rank in done)
    place = "first: step 1, rank 0, micro-batch 0 (samples 0, 2), forward of 1 (LogOf)"
    assert place in errors
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["exit_code"] == 70
    assert summary["cause"].endswith(place)
    assert errors.count("warning: step 1 was skipped: on rank 0") == 1
    assert len(list((tmp_path / "run/nonfinite").glob("*.pt"))) == 1
