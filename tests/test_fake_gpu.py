"""Training on GPUs that are not there (fake_gpu/): where it waits, what it allocates and launches.

`python tests/test_fake_gpu.py` measures again and rewrites fake_gpu/expected.json.
"""

import json
import random
import signal
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import tiny_hf
from fake_gpu import FOLDER, PYTHON, environ, needs_fake_gpus, on_fake_gpus
from fake_gpu.loops import STEPS, Steps, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.engine, needs_fake_gpus]

EXPECTED = FOLDER / "expected.json"
IMAGES = ["--task.target", "dist_amp.tasks.image_classification:ImageClassification"]
HF = ["--task.target", "dist_amp.tasks.hf_causal_lm:HFCausalLM", "--task.args.length", 64]
GPT2_SMALL = "--task.args.context 1024 --task.args.width 768 --task.args.layers 12"
GPT2_SMALL += " --task.args.heads 12 --task.args.vocabulary 50304"

CASES = {  # name: (ranks, settings)
    "gpt": (1, GPT2_SMALL.split()),
    "hf": (1, HF),
    "hf_packed": (1, [*HF, "--data.pack", "best_fit"]),
    "images": (1, IMAGES),
    "packed": (1, ["--data.pack", "best_fit"]),
    "muon": (1, ["--optim.name", "muon"]),
    "ema": (1, ["--optim.ema", 0.99]),
    "fp16_accumulated": (1, ["--precision.dtype", "fp16", "--train.accumulation_steps", 3]),
    "numerics": (1, ["--debug.numerics", "true", "--metrics.fingerprint", 10]),
    "ddp": (2, ["--parallel.strategy", "ddp"]),
    "fsdp": (8, ["--parallel.strategy", "fsdp"]),
    "hsdp": (8, ["--parallel.strategy", "hsdp"]),
}

PREFETCH = "dist_amp/loading/nested.py CopyStream.__call__"
ALLOWED = {  # where the host waits: why it may
    PREFETCH: "once per step, for the step before the last",
    "dist_amp/telemetry/sums.py Interval.read": "a step after a log step, for its metrics",
}
ALLOWED_IN = {
    "hf": {
        # It looks whether anything is padding, to choose the kernel; the mask is not on the host.
        "transformers/masking_utils.py _ignore_causal_mask_sdpa": "of transformers, per forward",
    },
    "hf_packed": {
        # It looks whether any row has a second document.
        "transformers/masking_utils.py find_packed_sequence_indices": "of transformers, as above",
    },
    "numerics": {
        "dist_amp/diagnostics/numerics.py Numerics._shares": "asked for, at log steps",
    },
}


def written_text(folder: Path) -> Path:
    """1,200 documents of 100 to 1,900 letters; the same at every call."""
    drawn = random.Random(0)
    rows = [{"text": "abcdefghi " * drawn.randint(10, 190)} for _ in range(1200)]
    return tiny_hf.write_rows(folder / "rows.jsonl", rows)


@cache
def steps(case: str) -> Steps:
    ranks, words = CASES[case]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if words is not IMAGES:
            words = [*words, "--data.path", written_text(folder), "--data.drop_last", "true"]
        if case.startswith("hf"):
            tiny_hf.make_tokenizer(tiny_hf.make_model(folder / "model"))
            words = [*words, "--task.args.model", folder / "model"]
        # DDP compares the ranks' parameters, and FSDP2 some values of theirs.
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
    assert (
        waits.syncs["dist_amp/loading/nested.py CopyStream.__call__: cudaEventSynchronize"] == STEPS
    )


@pytest.mark.parametrize("case", CASES)
def test_no_step_allocates_memory_of_the_device_or_frees_it(case):
    counts = steps(case).counts
    assert counts["mallocs"] == counts["frees"] == 0


def measured(case: str) -> dict[str, float]:
    result = steps(case)
    return {
        "peak_bytes": result.peak_bytes,
        "reserved_bytes": result.reserved_bytes,
        "launches_per_step": (result.counts["launches"] + result.counts["gemms"]) / STEPS,
    }


@pytest.mark.parametrize("case", CASES)
def test_memory_and_launches_are_as_they_were(case):
    expected = json.loads(EXPECTED.read_text())[case]
    now = measured(case)
    for name in ("peak_bytes", "reserved_bytes"):
        assert now[name] == pytest.approx(expected[name], rel=0.01), name  # sizes of small buffers
    # Another release of torch fuses something else.
    launches = expected["launches_per_step"]
    assert now["launches_per_step"] == pytest.approx(launches, rel=0.02)


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
    words += ["--data.path", written_text(tmp_path), "--data.workers", 1]
    words += "--checkpoint.every 10 --eval.every 10 --eval.batches 2 --metrics.log_every 5".split()
    torchrun = "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc_per_node"
    command = [PYTHON, *torchrun.split(), ranks, "-m", "fake_gpu.main_job", *words, "--train.steps"]
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
    assert (summary["stopped_by"], summary["exit_code"]) == ("preempted", 75), errors[-3000:]
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


if __name__ == "__main__":
    figures = {case: measured(case) for case in CASES}
    EXPECTED.write_text(json.dumps(figures, indent=4) + "\n")
