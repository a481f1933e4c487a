"""Every config runs as it is: three small steps on the number of ranks in its first line."""

import json
import re
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[2] / "configs"
# Only sizes are reduced, so that two cores without half-precision instructions can run it; never
# the way of running.
SMALL = "--train.steps 3 --train.micro_batch_size 2 --eval.batches 1 --metrics.log_every 1"
GPT = "--task.args.context 32 --task.args.width 32 --task.args.sample_bytes 8"
REDUCED = {
    "gpt_124m": "--train.global_batch_size 16 --task.args.context 16 --task.args.width 24 "
    "--task.args.layers 2 --task.args.vocabulary 256 --task.args.sample_bytes 8",
    "images": "",
    "hf_finetune": "--task.args.sample_tokens 3",
}
# By default one of each number of ranks and strategy, of which one reads the default data.
QUICK = {"demo": GPT, "debug": "--task.target tiny:Tiny", "fsdp_bf16": "--task.target tiny:Tiny"}


def stated_ranks(path):
    """The ranks in the second line: torchrun --nproc_per_node=N, python -m (0), or 2."""
    first = path.read_text().splitlines()[1]
    if match := re.search(r"--nproc_per_node=(\d+)", first):
        return int(match[1])
    return 0 if "python -m" in first else 2


ALL = {path.stem: REDUCED.get(path.stem, GPT) for path in sorted(CONFIGS.glob("*.toml"))}
SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in ALL.items() if row[0] != "demo"]


@pytest.mark.parametrize(("name", "words"), [*QUICK.items(), *SLOW])
def test_config_runs_as_it_is(name, words, launch, tmp_path):
    if name == "hf_finetune":
        tiny_hf = pytest.importorskip("tiny_hf")
        tiny_hf.make_tokenizer(tiny_hf.make_model(tmp_path / "model"))
        tiny_hf.write_rows(tmp_path / "chats.jsonl", tiny_hf.chats(48))
    if name == "images":
        pytest.importorskip("sklearn")
    path = CONFIGS / f"{name}.toml"
    ranks = stated_ranks(path)
    words = ["--config", path, "--run.dir", "run", *SMALL.split(), *words.split()]
    for done in launch.each(ranks, *words) if ranks else [launch(0, *words)]:
        assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    found = [summary[key] for key in ("stopped_by", "steps", "world_size")]
    assert found == ["completed", 3, max(ranks, 1)]
    if name.endswith(("bf16", "fp16")):
        assert f"{summary['strategy']}_{summary['precision']}" == name
