"""Training on GPUs that are not there (fake_gpu/): where it waits, what it allocates and launches.

`python tests/test_fake_gpu.py` measures again and rewrites fake_gpu/expected.json.
"""

import json
import random
import tempfile
from functools import cache
from pathlib import Path

import pytest
import tiny_hf
from fake_gpu import FOLDER, needs_fake_gpus, on_fake_gpus
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


if __name__ == "__main__":
    figures = {case: measured(case) for case in CASES}
    EXPECTED.write_text(json.dumps(figures, indent=4) + "\n")
