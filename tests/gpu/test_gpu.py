"""What only a GPU can show: run with `bash launch/test.sh -m gpu` on a machine that has one."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
import torch
from bit_exact_models import Crossed
from conftest import ROOT, TESTS
from test_bit_exact import trace
from test_mfu import Counted
from test_profiling import steps_of
from tiny import Tiny, log, log_row, make_run, parameters_of, save, take_steps

from benchmarks.gpu import SAME_LOSS
from benchmarks.gpu import main as gpu_bench
from benchmarks.report import BASELINE
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay
from dist_amp.diagnostics.profiling import memory_history
from dist_amp.settings import RunConfig
from dist_amp.step import train_step
from dist_amp.telemetry.mfu import find_mfu
from dist_amp.world import World, locate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


def gpu() -> World:
    return locate(RunConfig(device="cuda"))


@contextmanager
def never_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", ["norm", "value", "off"])
@pytest.mark.parametrize(
    "words", [["--use_amp", "false"], ["--precision.dtype", "bf16"], ["--precision.dtype", "fp16"]]
)
def test_steps_never_wait_for_the_device(words, clip, optimizer):
    words = [*words, "--train.clip_by", clip, "--optim.name", optimizer]
    words += ["--train.accumulation_steps", 2]
    run = make_run(gpu(), Tiny(uneven=True), *words, "--train.steps", 100)
    observers = [Consistency(run), NonfiniteReplay(run)]  # which look at their own intervals alone
    take_steps(run, 3)
    batches = [next(run.data) for _ in range(20)]
    with never_waiting():
        for step in batches:
            report = train_step(run, step)
            run.metrics.after_step(report)
            for observer in observers:
                observer.after_step(report, step)
    assert run.schedule.counters.sum() == 23


def test_float32_steps_are_those_of_the_cpu():
    words = ["--use_amp", "false", "--optim.name", "sgd", "--optim.lr", 0.1, "--train.steps", 5]
    on_gpu, on_cpu = make_run(gpu(), Tiny(), *words), make_run(World(), Tiny(), *words)
    take_steps(on_gpu, 5)
    take_steps(on_cpu, 5)
    expected = parameters_of(on_cpu)
    for name, parameter in parameters_of(on_gpu).items():
        # Five steps of 0.1 x a gradient clipped to 1; products of eight numbers summed in another
        # order.
        torch.testing.assert_close(parameter.cpu(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_main_job_uses_every_gpu(launch, tmp_path, strategy):
    gpus = torch.cuda.device_count()
    words = (
        "--task.target tiny:Tiny --train.steps 4 --train.micro_batch_size 2 --run.dir run".split()
    )
    done = launch(gpus, *words, "--parallel.strategy", strategy)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["world_size"] == gpus
    # The allocator's, not the process's.
    assert all(0 < rank["peak_memory_bytes"] < 2**30 for rank in summary["ranks"])


def test_a_checkpoint_of_a_gpu_is_read_on_a_cpu_and_back(tmp_path):
    words = ["--run.dir", tmp_path, "--precision.dtype", "fp16"]
    words += ["--precision.scaler.init_scale", 256]
    run = make_run(gpu(), Tiny(), *words)
    take_steps(run, 2)
    save(run)
    for world in (World(), gpu()):
        other = make_run(world, Tiny(), *words, "--run.resume", "auto")
        for name, parameter in parameters_of(other).items():
            assert torch.equal(parameter.cpu(), parameters_of(run)[name].cpu())
        take_steps(other, 1)


def test_verify_proves_every_way_of_running_on_these_gpus(tmp_path):
    task = ["--task.target", "tiny:Tiny", "--task.args.samples", "960"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{TESTS}"}
    command = [sys.executable, "-m", "dist_amp.verify", *task]
    more = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tiny on cuda" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU has one way of running")
def test_all_ways_of_running_on_these_gpus_have_the_same_bits(tmp_path):
    sizes = [size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count()]
    words = ["--task.target", "bit_exact_models:Crossed", "--train.micro_batch_size", "2"]
    words += ["--bit_exact", "--world_sizes", ",".join(map(str, sizes))]
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    command = [sys.executable, "-m", "dist_amp.verify", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    "words", [["--use_amp", "false"], ["--precision.dtype", "bf16"], ["--precision.dtype", "fp16"]]
)
def test_a_bit_exact_run_has_the_same_bits_again(words):
    first, again = (trace(gpu(), Crossed(), "single", 12, *words) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    assert first == again


def test_mfu_is_measured_where_the_peak_of_the_gpu_is_known():
    run = make_run(gpu(), Counted())
    mfu = find_mfu(run.world, run.config, run.task, run.parallel)
    if mfu is None:
        pytest.skip(f"{torch.cuda.get_device_name()} is not in the table of peaks")
    run.observers.add(mfu)
    for report in take_steps(run, 3):
        run.metrics.after_step(report)
    assert 0 < log(run).rank_tags(0)["throughput/mfu"] < 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_checkpoint_written_in_the_background_is_resumed_bit_for_bit(tmp_path, dtype):
    words = ["--run.dir", tmp_path, "--precision.dtype", dtype, "--train.steps", 9]
    words += ["--run.deterministic", "true"]
    through = make_run(gpu(), Tiny(), *words)
    with closing(through.saver) as saver:
        take_steps(through, 4)
        saver.save(wait=False)
        take_steps(through, 4)
    resumed = make_run(gpu(), Tiny(), *words, "--run.resume", "auto")
    assert resumed.step == 4
    take_steps(resumed, 4)
    torch.use_deterministic_algorithms(False)
    for name, parameter in parameters_of(through).items():
        assert torch.equal(parameters_of(resumed)[name], parameter)
    assert torch.equal(resumed.schedule.counters, through.schedule.counters)


def test_log_steps_wait_for_nothing_and_their_time_is_the_devices(tmp_path):
    words = ["--run.dir", tmp_path, "--train.steps", 100]
    run = make_run(gpu(), Tiny(uneven=True), *words)
    take_steps(run, 3)
    batches = [next(run.data) for _ in range(20)]
    torch.cuda.synchronize()
    with never_waiting():
        for batch in batches:
            run.metrics.after_step(train_step(run, batch))
        run.metrics.begin(23, run.schedule, run.scaler, run.data)
    row = run.metrics.read()
    assert row["applied_steps"] == 23
    assert row.rank_tags(0)["time/step_seconds"] > 0
    expected = log_row(run)
    assert expected["lr"] == row["lr"]


def test_a_trace_has_the_kernels_and_the_table_the_devices_time(tmp_path):
    words = ["--train.steps", 15, "--train.accumulation_steps", 2, "--debug.profile", 2]
    steps_of(gpu(), tmp_path, 15, *words)
    name = "rank00000_step_00000013-00000014"
    with gzip.open(tmp_path / f"profile/{name}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events), "CUPTI records them"
    table = (tmp_path / f"profile/{name}_table.txt").read_text()
    assert "Self CUDA" in table


def test_a_snapshot_of_memory_knows_what_allocated_the_model(tmp_path):
    words = ["--train.steps", 15, "--debug.profile", 2]
    with memory_history(tmp_path, gpu()):
        steps_of(gpu(), tmp_path, 15, *words)
    with (tmp_path / "profile/rank00000_step_00000014_memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    traces = snapshot["device_traces"][torch.cuda.current_device()]
    stacks = [entry.get("frames", []) for entry in traces]
    assert any("build_parallel" in frame["name"] for frames in stacks for frame in frames)


GREEDY = """
import torch
from tiny import Tiny

class Greedy(Tiny):
    def loss_sum(self, model, batch):
        huge = torch.ones(len(batch["x"]), 2**36, device=batch["x"].device)
        return super().loss_sum(model, batch) * huge.mean()

class Huge(Tiny):
    def build_model(self):
        torch.cuda.set_per_process_memory_fraction(0.01)
        return torch.nn.Linear(2**15, 2**15)
"""


def test_memory_that_runs_out_names_what_to_lower_and_leaves_its_history(launch, tmp_path):
    (tmp_path / "greedy.py").write_text(GREEDY)
    done = launch(0, "--task.target", "greedy:Greedy", "--run.dir", "run", "--debug.profile", "1")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    # 8 samples of 2^36 float32.
    assert last.startswith(
        "error: rank 0 ran out of GPU memory in step 1: asked for 2,048.00 GiB more than the "
    )
    assert (tmp_path / "run/profile/rank00000_out_of_memory.pickle").stat().st_size > 0

    done = launch(0, "--task.target", "greedy:Huge", "--run.dir", "huge")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "ran out of GPU memory before the first step: asked for 4.00 GiB more than the " in last
    assert "; parameters take 4.00 GiB, gradients 4.00 GiB, " in last
    assert last.endswith("; use a smaller model")


def test_the_benchmark_of_one_gpu_measures_both_precisions_here(tmp_path):
    words = ["--models", "124m", "--micro_batch", "2", "--rounds", "2"]
    assert gpu_bench([*words, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert len(report["cells"]) == 4
    for cell in report["cells"]:
        ours, reference = cell["loops"]["dist_amp"], cell["loops"][BASELINE]
        assert ours["loss"] == pytest.approx(reference["loss"], rel=SAME_LOSS)
        for row in (ours, reference):
            assert "note" not in row
            # Parameters, gradients and both moments in float32, at least.
            assert row["peak_bytes"] > 16 * cell["parameters"]
