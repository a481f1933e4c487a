"""Training on GPUs that are not there (gpu_stand_in/): host syncs, memory and launches.

`PYTHONPATH=tests python tests/slow/test_gpu_stand_in.py` measures again and rewrites
gpu_stand_in/expected.json.
"""

import json
import math
import random
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import tiny_hf
from gpu_stand_in import FOLDER, PYTHON, ROOT, environ, needs_fake_gpus, on_fake_gpus
from gpu_stand_in.loops import (
    STEPS,
    Steps,
    kernels_of,
    learning_rates_read,
    overwritten_in_evaluation,
    saved_too_early,
    steps_of,
    unordered_accesses,
)
from gpu_stand_in.stand_in import peaks_of

from dist_amp.commands.plan import make_job
from dist_amp.commands.simulation import simulate
from dist_amp.config.load import load_config

pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_fake_gpus]

EXPECTED = FOLDER / "expected.json"
IMAGES = ["--task.target", "dist_amp.tasks.image_classification:ImageClassification"]
HF = ["--task.target", "dist_amp.tasks.hf_causal_lm:HFCausalLM", "--task.args.length", 64]
COMPILED = ["--compile.blocks", "auto"]
FP8 = ["--precision.dtype", "fp8", *COMPILED]
MASKED = ["--task.args.packed_attention", "mask"]
GPT2_SMALL = "--task.args.context 1024 --task.args.width 768 --task.args.layers 12"
GPT2_SMALL += " --task.args.heads 12 --task.args.vocabulary 50304"

CASES = {  # name: (ranks, settings)
    "gpt": (1, GPT2_SMALL.split()),
    "hf": (1, HF),
    "hf_packed": (1, [*HF, "--data.pack", "best_fit"]),
    "images": (1, IMAGES),
    "packed": (1, ["--data.pack", "best_fit"]),
    "packed_masked": (1, ["--data.pack", "best_fit", *MASKED]),
    "muon": (1, ["--optim.name", "muon"]),
    "ema": (1, ["--optim.ema", 0.99]),
    "fp16_accumulated": (1, ["--precision.dtype", "fp16", "--train.accumulation_steps", 3]),
    "numerics": (1, ["--debug.numerics", "true", "--metrics.fingerprint", 10]),
    "ddp": (2, ["--parallel.strategy", "ddp"]),
    "fsdp": (8, ["--parallel.strategy", "fsdp"]),
    "hsdp": (8, ["--parallel.strategy", "hsdp"]),
    "fsdp_offload": (8, ["--parallel.strategy", "fsdp", "--parallel.cpu_offload", "true"]),
    "gpt_compiled": (1, [*GPT2_SMALL.split(), *COMPILED]),
    "gpt_fp8": (1, [*GPT2_SMALL.split(), *FP8]),
    "fsdp_compiled": (8, ["--parallel.strategy", "fsdp", *COMPILED]),
}

PREFETCH = "dist_amp/loading/nested.py CopyStream.__call__"
NORM = "dist_amp/parallel.py Parallel.global_grad_norm"
ALLOWED = {  # where the host waits: why it may
    PREFETCH: "once per step, for the step before the last",
    "dist_amp/telemetry/sums.py Interval.read": "a step after a log step, for its metrics",
}
ALLOWED_IN = {
    "numerics": {
        "dist_amp/diagnostics/numerics.py Numerics._shares": "asked for, at log steps",
        "dist_amp/diagnostics/numerics.py Numerics.after_step": "the rate, at log steps",
    },
    "fsdp_offload": {
        "dist_amp/scaling/hooks.py _timed": "FSDP2, for each gradient's copy to the host",
        NORM: "once per step, since the host computes the update; 4 bytes to the device, staged",
        "dist_amp/telemetry/metrics.py Metrics.begin": "at log steps, when the device is idle",
    },
}


def written_text(folder: Path) -> Path:
    """1,200 documents of 100 to 1,900 letters; the same at every call."""
    drawn = random.Random(0)
    rows = [{"text": "abcdefghi " * drawn.randint(10, 190)} for _ in range(1200)]
    return tiny_hf.write_rows(folder / "rows.jsonl", rows)


def prepared(case: str, folder: Path) -> tuple[int, list[object]]:
    """The ranks and settings of a case, whose files are written."""
    ranks, words = CASES[case]
    if words is not IMAGES:
        words = [*words, "--data.path", written_text(folder), "--data.drop_last", "true"]
    if case.startswith("hf"):
        tiny_hf.make_tokenizer(tiny_hf.make_model(folder / "model"))
        words = [*words, "--task.args.model", folder / "model"]
    return ranks, words


@cache
def steps(case: str) -> Steps:
    with tempfile.TemporaryDirectory() as name:
        ranks, words = prepared(case, Path(name))
        # DDP compares the ranks' parameters.
        return on_fake_gpus(ranks, steps_of, words, ranks, values=case == "ddp")


@pytest.mark.parametrize("case", CASES)
def test_steps_and_log_steps_wait_for_the_device_only_where_it_is_meant(case):
    allowed = {**ALLOWED, **ALLOWED_IN.get(case, {})}
    waits = steps(case)
    others = {
        f"{name} at {waits.lines[name]}": times
        for name, times in waits.syncs.items()
        if name.rpartition(": ")[0] not in allowed
    }
    assert not others
    assert waits.syncs[f"{PREFETCH}: cudaEventSynchronize"] == STEPS


def test_under_cpu_offload_the_host_waits_for_the_norm_once_per_step():
    assert steps("fsdp_offload").syncs[f"{NORM}: cudaStreamSynchronize"] == STEPS


def measured(case: str) -> dict[str, float]:
    result = steps(case)
    return {
        "peak_bytes": result.peak_bytes,
        "reserved_bytes": result.reserved_bytes,
        "launches_per_step": (result.counts["launches"] + result.counts["gemms"]) / STEPS,
    }


@pytest.mark.parametrize("case", CASES)
def test_a_step_allocates_nothing_and_takes_the_memory_and_the_launches_that_it_took(case):
    counts = steps(case).counts
    assert counts["mallocs"] == counts["frees"] == 0
    assert counts["overwritten"] == 0, "pinned memory that the device had still to read"
    expected = json.loads(EXPECTED.read_text())[case]
    now = measured(case)
    for name in ("peak_bytes", "reserved_bytes"):
        assert now[name] == pytest.approx(expected[name], rel=0.01), name  # sizes of small buffers
    # Another release of torch fuses something else.
    launches = expected["launches_per_step"]
    assert now["launches_per_step"] == pytest.approx(launches, rel=0.02)


MASK = "fmha_cutlassF_bf16"
FLASH = "flash_fwd_kernel"


@pytest.mark.parametrize(
    ("case", "kernel", "not_this"),
    [
        ("gpt", FLASH, MASK),
        ("hf", FLASH, MASK),
        ("packed", FLASH, MASK),
        ("hf_packed", FLASH, MASK),
        ("packed_masked", MASK, FLASH),
    ],
)
def test_attention_takes_the_fastest_kernel_also_of_packed_rows(tmp_path, case, kernel, not_this):
    names = on_fake_gpus(1, kernels_of, prepared(case, tmp_path)[1])
    assert any(kernel in name for name in names)
    assert not any(not_this in name for name in names)


# ---- the plan ----

PLANNED = [
    ("llama", "single", 1, "none"),
    ("gpt2", "ddp", 2, "none"),
    ("qwen2_moe", "fsdp", 8, "none"),
    ("t5", "fsdp", 8, "full"),
    ("whisper", "fsdp", 64, "selective"),
    ("dinov2", "hsdp", 64, "none"),
    ("resnet", "ddp", 2, "none"),
    ("llama_8b", "fsdp", 8, "none"),
]
GPT_124M = "--config gpt_124m --train.global_batch_size auto --task.args.loss_chunk"


def test_casts_to_float8_are_fused_with_what_computes_their_operands(tmp_path):
    ranks, words = prepared("gpt_fp8", tmp_path)
    names = on_fake_gpus(ranks, kernels_of, words)
    fused = [name for name in names if name.startswith("triton_") and "scaled_mm" in name]
    assert any("native_layer_norm" in name for name in fused)
    assert any("gelu" in name for name in fused)
    # 300 tokens: torch's product takes only multiples of 16, over which a gradient sums.
    odd = ["--task.args.context", 100, "--train.micro_batch_size", 3]
    assert on_fake_gpus(ranks, kernels_of, [*words, *odd])


def check_plan(words, ranks=1, values=False):
    words = [*words, "--compile.blocks", "false"]
    real = on_fake_gpus(min(ranks, 8), peaks_of, words, ranks, values=values)
    plan = simulate(make_job(load_config(words, environ={}), ranks, 0))
    assert plan.on_device == pytest.approx(max(real.values()), rel=0.03)


@pytest.mark.parametrize(("model", "strategy", "ranks", "recomputed"), PLANNED)
def test_a_planned_peak_is_the_allocators_within_3_percent(model, strategy, ranks, recomputed):
    words = ["--task.target", "gpu_stand_in.strangers:Stranger", "--task.args.name", model]
    words += ["--parallel.activation_checkpointing", recomputed, "--precision.tf32", "true"]
    if ranks > 1:
        words += ["--parallel.strategy", strategy]
    if strategy == "hsdp":
        words += ["--parallel.replicas", "8"]
    check_plan(words, ranks, values=strategy == "ddp")


@pytest.mark.parametrize(
    "words", ["off", "4096", "off --parallel.activation_checkpointing selective"]
)
def test_the_planned_peak_of_a_gpt_of_124_m_is_the_allocators_within_3_percent(words):
    check_plan([*GPT_124M.split(), *words.split()])


# ---- the main job ----


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_the_main_job_evaluates_saves_stops_at_a_signal_and_resumes(tmp_path, strategy, ranks):
    run = tmp_path / "run"
    words = ["--run.dir", run, "--parallel.strategy", strategy]
    words += ["--data.path", written_text(tmp_path), "--data.workers", int(strategy == "ddp")]
    words += "--checkpoint.every 10 --eval.every 10 --eval.batches 2 --metrics.log_every 5".split()
    if strategy != "ddp":  # each rank takes a CPU minutes to compile
        words += ["--compile.blocks", "false"]
    torchrun = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node"
    command = [PYTHON, *torchrun.split(), ranks, "-m", "gpu_stand_in.main_job", *words]
    command.append("--train.steps")
    environment = environ(ranks, values=strategy == "ddp")

    def start(steps):
        arguments = [str(word) for word in [*command, steps]]
        return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)

    job = start(10_000)
    wait_for(lambda: (run / "checkpoints/step_00000010").exists() or job.poll() is not None)
    job.send_signal(signal.SIGTERM)
    errors = job.communicate(timeout=120)[1]
    assert (run / "summary.json").exists(), errors[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["stopped_by"], summary["exit_code"]) == ("preempted", 75), summary["cause"]
    stopped = summary["steps"]
    assert (run / f"checkpoints/step_{stopped:08d}").exists()

    job = start(stopped + 10)
    errors = job.communicate(timeout=240)[1]
    assert job.returncode == 0, errors[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["resumed_from_step"], summary["steps"]) == (stopped, stopped + 10)
    assert (summary["world_size"], summary["strategy"]) == (ranks, strategy)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if "eval/loss" in row} >= {10, stopped + 10}
    # Of the allocator: the model and a step's activations.
    assert all(0 < rank["peak_memory_bytes"] < 2**30 for rank in summary["ranks"])


# ---- the tests of a real GPU ----


NO_VALUES = {  # of test_gpu.py: assertions that a device which computes nothing can't meet
    ("test_steps_never_wait_for_the_device", "run.schedule.counters.sum() == 23"),
    ("test_float32_steps_are_those_of_the_cpu", "torch.testing.assert_close("),
    # Its checks of the first log step end each of these jobs; the main job has a test above.
    ("test_the_main_job_uses_every_gpu", "done.returncode == 0"),
    ("test_verify_proves_every_way_of_running_on_these_gpus", "done.returncode == 0"),
    ("test_all_ways_of_running_on_these_gpus_have_the_same_bits", "done.returncode == 0"),
    # A gathered parameter that nothing was gathered into has other values than its shards.
    ("test_all_ways_of_running_on_these_gpus_have_the_same_bits", "'refused' not in done.stdout"),
    # What lay in memory that no kernel has written.
    ("test_a_bit_exact_run_has_the_same_bits_again", "first == again"),
    ("test_a_checkpoint_written_in_the_background_is_resumed_bit_for_bit", "torch.equal("),
    ("test_log_steps_wait_for_nothing_and_their_time_is_the_devices", "row['applied_steps'] == "),
    ("test_log_steps_wait_for_nothing_and_their_time_is_the_devices", "expected['lr'] == row["),
    # There is no CUPTI, which records kernels.
    ("test_a_trace_has_the_kernels_and_the_table_the_devices_time", "event.get('cat')"),
    ("test_a_trace_has_the_kernels_and_the_table_the_devices_time", "'Self CUDA' in table"),
    ("test_the_benchmark_of_one_gpu_measures_both_precisions_here", "ours['loss'] == "),
}


def test_the_tests_of_a_gpu_run_but_for_values(tmp_path):
    words = f"-q -m gpu -p gpu_stand_in.plugin --noted {tmp_path}/noted -p no:cacheprovider -rf"
    command = [PYTHON, "-m", "pytest", *words.split(), "tests/gpu/test_gpu.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ(2, values=True), capture_output=True, text=True
    )
    noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
    others = [
        one
        for one in noted
        if not any(one["test"] == test and part in one["line"] for test, part in NO_VALUES)
    ]
    assert not others, done.stdout
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


# ---- out of memory ----


def test_memory_that_runs_out_is_reported_with_what_was_asked_for(tmp_path):
    words = ["--run.dir", tmp_path / "run", *GPT2_SMALL.split(), "--train.micro_batch_size", 300]
    words += ["--data.path", written_text(tmp_path)]
    command = [PYTHON, "-m", "dist_amp.train", *map(str, words)]
    done = subprocess.run(command, env=environ(1), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    # 12 blocks of 12 x 768^2, the tied embedding, and norms; the first update makes two moments.
    bytes_of_model = 4 * (12 * (12 * 768**2 + 2 * 768) + 50304 * 768 + 768)
    assert "rank 0 ran out of GPU memory in step 1: asked for " in last
    assert " GiB in use, of 78.60 GiB available; " in last
    assert f"gradients {bytes_of_model / 2**20:.2f} MiB, " in last
    assert f"optimizer state {2 * bytes_of_model / 2**20:.2f} MiB; " in last
    assert "a train.micro_batch_size below 300 (with more train.accumulation_steps), or " in last


# ---- what happens before what ----


def test_a_log_step_reads_what_it_copied_only_after_it_has_arrived(tmp_path):
    words = ["--data.path", written_text(tmp_path)]
    assert on_fake_gpus(1, learning_rates_read, words, False) == [0.0, 0.0]
    planted = on_fake_gpus(1, learning_rates_read, words, True)
    assert all(math.isnan(rate) for rate in planted), "a missing wait is found"


ORDERED = ["packed", "fp16_accumulated", "ema", "ddp", "fsdp", "hsdp", "fsdp_offload"]


@pytest.mark.parametrize("case", ORDERED)
def test_no_tensor_is_used_on_two_streams_without_an_event_between(tmp_path, case):
    ranks, words = CASES[case]
    arguments = ([*words, "--data.path", written_text(tmp_path)], "", ranks)
    assert on_fake_gpus(ranks, unordered_accesses, *arguments, values=case == "ddp") == []


@pytest.mark.parametrize(
    ("planted", "operation"),
    [("prefetch", "aten::embedding"), ("staging", "aten::copy_")],
    ids=["a micro-batch", "a parameter that is saved"],
)
def test_a_copy_that_no_event_orders_is_found(tmp_path, planted, operation):
    words = ["--data.path", written_text(tmp_path)]
    found = on_fake_gpus(1, unordered_accesses, words, planted)
    assert "CSAN detected a possible data race" in found[0]
    assert operation in found[0], "which reads it"


def test_a_background_save_writes_what_it_copied_only_after_it_has_arrived(tmp_path):
    words = ["--data.path", written_text(tmp_path)]
    assert on_fake_gpus(1, saved_too_early, words, False) == []
    assert "head.weight" in on_fake_gpus(1, saved_too_early, words, True), "a missing wait is found"


def test_under_cpu_offload_an_average_is_replaced_only_after_the_device_has_read_it(tmp_path):
    ranks, words = CASES["fsdp_offload"]
    words = [*words, "--data.path", written_text(tmp_path), "--optim.ema", 0.99]
    assert on_fake_gpus(ranks, overwritten_in_evaluation, words, ranks) == 0


if __name__ == "__main__":
    figures = {case: measured(case) for case in CASES}
    EXPECTED.write_text(json.dumps(figures, indent=4) + "\n")
