"""Which steps are profiled, on which ranks, what is written, and that profiling changes no step."""

import gzip
import json
import re
import signal
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks
from test_train import TINY, summary_of, wait_for
from tiny import Tiny, make_run, parameters_of
from torch._C._autograd import DeviceType

from dist_amp.config.load import load_config
from dist_amp.config.parse import flat_values
from dist_amp.diagnostics.profiling import (
    MAX_ALLOCATIONS,
    PARTS,
    Profile,
    check_debug,
    covered,
    memory_history,
    time_per_step,
    top,
    window,
)
from dist_amp.errors import ConfigError
from dist_amp.step import train_step
from dist_amp.train import main
from dist_amp.world import World


def steps_of(world, folder, steps, *words):
    """A run that took `steps` steps with a Profile, as in the main job."""
    run = make_run(world, Tiny(), "--run.dir", folder, "--train.micro_batch_size", 2, *words)
    with Profile(run) as profile:
        take(run, profile, steps)
    return run


def take(run, profile, steps):
    for _ in range(steps):
        micro_batches = next(run.data)
        report = train_step(run, micro_batches)
        profile.after_step(report, micro_batches)


def ranges(path):
    """{name: [(start, end), ...]} of the labelled ranges in a trace, in microseconds."""
    found = {}
    with gzip.open(path) as file:
        for event in json.load(file)["traceEvents"]:
            if event.get("cat") == "user_annotation":
                found.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_each_part_of_each_recorded_step_is_a_range_in_the_trace(tmp_path, capsys):
    words = ["--train.steps", 15, "--train.accumulation_steps", 3, "--debug.profile", 2]
    run = steps_of(World(), tmp_path, 15, *words)
    name = "rank00000_step_00000013-00000014"
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [f"{name}.json.gz", f"{name}_table.txt"]
    found = ranges(tmp_path / f"profile/{name}.json.gz")
    counts = {label: len(times) for label, times in found.items()}
    assert {"ProfilerStep#13": 1, "ProfilerStep#14": 1, "data wait": 6, "micro-batch": 6, "forward": 6, "backward": 6,
            "gradient norm": 2, "update": 2, "Optimizer.step#FusedAdamW.step": 2}.items() <= counts.items()  # fmt: skip
    in_order = sorted((start, end, label) for label in PARTS for start, end in found[label])
    once = ["data wait"] * 3 + ["forward", "backward"] * 3 + ["gradient norm", "update"]
    assert [label for _, _, label in in_order] == once * 2
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(in_order))
    assert found["ProfilerStep#13"][0][0] <= in_order[0][0]
    assert in_order[-1][1] <= found["ProfilerStep#14"][0][1]

    table = (tmp_path / f"profile/{name}_table.txt").read_text()
    assert table.startswith("steps 13 to 14 of rank 0 of 1\n")
    assert "aten::addmm" in table
    said = capsys.readouterr().out
    assert "profile  steps 13 to 14 of rank 0 of 1\n" in said
    assert "ms per step on the host: data wait " in said
    assert f"{name}.json.gz opens in ui.perfetto.dev" in said
    for owner, names in ((run.parallel, ["global_grad_norm"]), (run.precision, ["autocast"]), (run.data, ["receive"]),
                         (run.optimizer, ["apply"]), (run.optimizer, ["step"])):  # fmt: skip
        assert not set(names) & set(vars(owner)), "the wrappers are removed"


def test_a_run_that_does_not_profile_is_not_wrapped(tmp_path):
    run = make_run(World(), Tiny(), "--run.dir", tmp_path)
    micro_batches = next(run.data)
    report = train_step(run, micro_batches)
    before = [dict(vars(part)) for part in (run.parallel, run.precision, run.data, run.optimizer)]
    backward = torch.Tensor.backward
    with Profile(run) as profile:
        profile.after_step(report, micro_batches)
        assert torch.Tensor.backward is backward
        assert [dict(vars(part)) for part in (run.parallel, run.precision, run.data, run.optimizer)] == before
    assert list(tmp_path.iterdir()) == []


def profiled_and_not(world, folder):
    words = ["--train.steps", 8, "--train.accumulation_steps", 2, "--precision.dtype", "fp16"]
    plain, profiled = steps_of(world, folder, 8, *words), steps_of(world, folder, 8, *words, "--debug.profile", 2)
    same = [
        torch.equal(a, b) for a, b in zip(parameters_of(plain).values(), parameters_of(profiled).values(), strict=True)
    ]
    steps_of(world, folder, 8, *words, "--debug.profile", 1, "--debug.ranks", 1, "--parallel.strategy", "fsdp")
    return all(same)


def test_chosen_ranks_write_and_every_rank_takes_the_same_steps(tmp_path):
    assert on_ranks(2, profiled_and_not, tmp_path) == [True, True]
    names = sorted(path.name for path in (tmp_path / "profile").glob("*.gz"))
    ddp = [f"rank0000{rank}_step_00000007-00000008.json.gz" for rank in range(2)]
    fsdp = "rank00001_step_00000008-00000008.json.gz"
    assert names == sorted([*ddp, fsdp])
    for name in names:
        found = ranges(tmp_path / "profile" / name)
        assert {*PARTS, "micro-batch"} <= set(found)
        collectives = Counter(label for label in found if label.startswith("gloo:"))
        assert collectives, "collectives are in the trace under their own names"


@pytest.mark.parametrize(
    ("done", "last_step", "count", "pauses", "expected"),
    [
        (0, 100, 3, [], (13, 15)),
        (50, 100, 3, [], (63, 65)),  # counted from where this process started
        (0, 9, 3, [], (7, 9)),  # a short run's last steps
        (0, 3, 5, [], (2, 3)),  # at least one step for the profiler's warm-up
        (0, 1, 1, [], (2, 1)),  # nothing
        (0, 100, 3, [100, 15], (13, 15)),
        (0, 100, 3, [14], (15, 17)),  # more of them after the evaluation
        (0, 100, 50, [40], (41, 80)),
        (0, 100, 3, [1], (13, 13)),  # an evaluation after each
        (0, 15, 9, [10], (11, 15)),
    ],
)
def test_the_recorded_steps_start_after_a_warm_up_and_contain_no_evaluation(done, last_step, count, pauses, expected):
    assert window(done, last_step, count, pauses) == expected


def test_a_run_that_ends_early_writes_what_was_recorded_or_says_that_nothing_was(tmp_path, capsys):
    words = ["--train.steps", 100, "--debug.profile", 5]
    steps_of(World(), tmp_path, 14, *words)
    assert "profile  steps 13 to 14 of rank 0 of 1, 2 of debug.profile=5: then came " in capsys.readouterr().out
    assert len(list((tmp_path / "profile").iterdir())) == 2
    steps_of(World(), tmp_path, 12, *words)
    said = "debug.profile=5 recorded nothing: the run ended after step 12, and step 13 would have been the first;"
    assert said in capsys.readouterr().err


def test_a_failure_in_a_recorded_step_is_raised_unchanged(monkeypatch, tmp_path):
    run = make_run(World(), Tiny(), "--run.dir", tmp_path, "--train.steps", 100, "--debug.profile", 5)

    def fail_in_step_14(*_):
        if run.step == 13:
            raise ZeroDivisionError

    run.optimizer.register_step_pre_hook(fail_in_step_14)
    with pytest.raises(ZeroDivisionError), Profile(run) as profile:
        take(run, profile, 20)
    assert run.step == 13
    assert "apply" not in vars(run.optimizer)
    assert not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file in its place")
    assert steps_of(World(), tmp_path, 20, "--train.steps", 20, "--debug.profile", 2).step == 20
    assert "warning: rank 0: the profile could not be written: FileExistsError" in capsys.readouterr().err


class OfAGpu:
    """What torch's profiler returns for two steps on a GPU, in microseconds."""

    def __init__(self, kernels):
        self.kernels = kernels

    def key_averages(self):
        def event(key, device, label, host, on_device):
            return SimpleNamespace(key=key, device_type=device, is_user_annotation=label, count=4,
                                   cpu_time_total=host, self_cpu_time_total=host,
                                   self_device_time_total=on_device)  # fmt: skip

        cpu, cuda = DeviceType.CPU, DeviceType.CUDA
        return [event("ProfilerStep*", cpu, True, 8000, 0), event("ProfilerStep*", cuda, True, 0, 20000),
                event("forward", cpu, True, 2000, 0), event("forward", cuda, True, 0, 9000),
                event("aten::mm", cpu, False, 900, 6000), event("gemm_kernel", cuda, False, 0, 6000),
                event("copy_kernel", cuda, False, 0, 2000)]  # fmt: skip

    def events(self):
        label = (DeviceType.CUDA, True, 0, 20000)
        events = [(DeviceType.CPU, False, 0, 30000), label, *((DeviceType.CUDA, False, *span) for span in self.kernels)]
        return [
            SimpleNamespace(
                device_type=device, is_user_annotation=label, time_range=SimpleNamespace(start=start, end=end)
            )
            for device, label, start, end in events
        ]


def test_the_idle_time_and_the_kernels_of_a_gpu_are_reported():
    gpu = OfAGpu([(1000, 7000), (5000, 8000), (10000, 11000)])
    assert time_per_step(gpu, 2, DeviceType.CUDA) == (
        "4.00 ms per step on the host: forward 25.0 %, the rest 75.0 %\n"
        "5.00 ms per step on the device, which was idle for 20.0 % of it"
    )
    assert top(gpu, 2, DeviceType.CUDA) == [
        " 75.0 %      3.00 ms  gemm_kernel (2 times)",
        " 25.0 %      1.00 ms  copy_kernel (2 times)",
    ]
    assert time_per_step(OfAGpu([]), 2, DeviceType.CUDA).endswith("is missing or not permitted")


def test_kernels_that_overlap_count_once():
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2)]) == 5
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        (["--debug.ranks", "0", "4"], World(world_size=4),
         "debug.ranks=0 4 must be existing ranks (0 to 3); use some of them, or all"),
        (["--debug.ranks", "1"], World(), "debug.ranks=1 must be existing ranks (only 0); use some of them, or all"),
        (["--debug.ranks"], World(), "debug.ranks=(nothing) must be existing ranks (only 0); use some of them, or all"),
        (["--debug.memory_snapshot", "true"], World(),
         "debug.memory_snapshot=true needs a GPU: torch keeps no history of CPU memory; use false, or"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_exist_and_a_snapshot_of_cpu_memory_are_rejected(words, world, said):
    with pytest.raises(ConfigError) as rejected:
        check_debug(load_config(words, environ={}).debug, world)
    assert str(rejected.value).startswith(said)


@pytest.fixture
def history(monkeypatch):
    """The calls to torch.cuda.memory, in order."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))

    def dump(filename):
        calls.append(filename)

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return calls


def test_memory_history_starts_before_the_model_and_is_written_if_memory_runs_out(history, tmp_path, capsys):
    config = load_config(["--debug.memory_snapshot", "true", "--debug.ranks", "1"], environ={}).debug
    with memory_history(config, tmp_path, World(rank=0, world_size=2)):
        assert history == []
    with suppress(torch.OutOfMemoryError), memory_history(config, tmp_path, World(rank=1, world_size=2)):
        assert history == [{"max_entries": MAX_ALLOCATIONS, "stacks": "python"}]
        raise torch.OutOfMemoryError
    assert history[1:] == [str(tmp_path / "profile/rank00001_out_of_memory.pickle"), {"enabled": None}]
    assert "open it at pytorch.org/memory_viz" in capsys.readouterr().out


def test_a_memory_snapshot_is_written_after_the_recorded_steps(history, tmp_path):
    steps_of(World(), tmp_path, 16, "--train.steps", 16, "--debug.memory_snapshot", "true", "--debug.profile", 2)
    assert history == [str(tmp_path / "profile/rank00000_step_00000014_memory.pickle")]
    steps_of(World(), tmp_path, 16, "--train.steps", 16, "--debug.memory_snapshot", "true")
    assert history[1:] == [str(tmp_path / "profile/rank00000_step_00000013_memory.pickle")]


def test_the_main_job_profiles_and_tensorboard_has_the_table(monkeypatch, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    words = ["--train.steps", "20", "--debug.profile", "3", "--run.dir", "run", "--eval.every", "14"]
    assert main([*TINY, *words, "--run.device", "cpu"]) == 0
    assert "profile  steps 15 to 17 of rank 0 of 1\n" in capsys.readouterr().out
    board = EventAccumulator(str(tmp_path / "run/tensorboard/rank00000")).Reload()
    text = board.Tensors("profile/text_summary")[0]
    assert text.step == 17
    assert b"aten::addmm" in text.tensor_proto.string_val[0]


def test_every_debugging_setting_is_documented_and_every_documented_setting_exists():
    page = (ROOT / "docs/debugging.md").read_text()
    keys = dict(flat_values(load_config([], environ={})))
    debug_keys = [key for key in keys if key.startswith("debug.")]
    assert [key for key in debug_keys if key not in page] == []
    assert [key for key in re.findall(r"--([a-z_]+\.[a-z_.]+)", page) if key not in keys] == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_on_two_ranks_are_profiled_and_so_is_a_resumed_run(launch, tmp_path, backend):
    words = [*TINY, "--train.accumulation_steps", "2", "--compile.blocks", "true", "--compile.backend", backend,
             "--run.dir", "run", "--optim.schedule", "constant"]  # fmt: skip
    first = launch(2, *words, "--train.steps", "5")
    assert first.returncode == 0, first.stderr[-2000:]
    done = launch(2, *words, "--train.steps", "30", "--debug.profile", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        found = ranges(tmp_path / f"run/profile/rank{rank:05d}_step_00000018-00000019.json.gz")
        assert {*PARTS, "ProfilerStep#18", "ProfilerStep#19"} <= set(found)
        assert len(found["forward"]) == 4


@pytest.mark.slow
def test_a_signal_during_the_recorded_steps_saves_and_keeps_what_was_recorded(launch, tmp_path):
    words = [*TINY, "--task.target", "tiny:Slow", "--train.steps", "2000", "--debug.profile", "1900",
             "--eval.every", "off", "--checkpoint.every", "1999", "--run.dir", "run"]  # fmt: skip
    process = launch.start(0, *words)
    lines = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: lines.exists() and '"step": 30,' in lines.read_text(), "step 30")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, err[-2000:]
    stopped = summary_of(tmp_path / "run")["steps"]
    assert f"profile  steps 13 to {stopped} of rank 0 of 1, {stopped - 12} of debug.profile=1900" in out
    assert (tmp_path / f"run/profile/rank00000_step_00000013-{stopped:08d}.json.gz").exists()
    assert (tmp_path / f"run/checkpoints/step_{stopped:08d}").is_dir()
