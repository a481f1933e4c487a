"""Whole runs on the command line: rows on disk, tokenized, packed and mixed, on several ranks,
resumed on others.
"""

import json
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from forked import ROOT

SMALL = [
    *(
        "--task.args.context",
        32,
        "--task.args.width",
        16,
        "--task.args.layers",
        1,
        "--task.args.heads",
        2,
    ),
    *(
        "--task.args.sample_bytes",
        4,
        "--train.micro_batch_size",
        2,
        "--use_amp",
        "false",
        "--metrics.log_every",
        2,
    ),
]


def documents(count, seed, alphabet):
    rng = random.Random(seed)
    return ["".join(rng.choices(alphabet, k=rng.randint(3, 70))) for _ in range(count)]


@pytest.fixture
def files(tmp_path):
    """wiki.jsonl and code.parquet, of 16 row groups."""
    rows = documents(160, 0, "abc de.")
    (tmp_path / "wiki.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    table = pyarrow.table({"content": documents(160, 1, "(){}01=\n")})
    pyarrow.parquet.write_table(table, tmp_path / "code.parquet", row_group_size=10)
    return tmp_path


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def succeeded(run):
    for done in run if isinstance(run, list) else [run]:
        assert done.returncode == 0, done.stderr[-3000:]
    return run


def test_a_mixture_of_tokens_and_rows_is_packed_and_resumed_on_other_ranks(files, launch):
    words = f"--data.path {files}/wiki.jsonl --data.tokenizer bytes --out {files}/tokens".split()
    done = subprocess.run(
        [sys.executable, "-m", "dist_amp.tokenize", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    config = files / "mixture.toml"
    config.write_text(
        f'[data]\npack = "best_fit"\n[data.sources.wiki]\npath = "{files / "tokens"}"\nweight = 3\n'
        f'[data.sources.code]\npath = "{files / "code.parquet"}"\ntext_column = "content"\n'
    )
    run = ["--config", config, "--run.dir", "run", "--train.global_batch_size", 8, *SMALL]
    succeeded(launch.each(2, *run, "--train.steps", 4))
    succeeded(launch(0, *run, "--train.steps", 8))
    lines = metrics(files / "run")
    summary = json.loads((files / "run/summary.json").read_text())
    assert (summary["steps"], summary["resumed_from_step"], summary["world_size"]) == (8, 4, 1)
    logged = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6, 8]
    for line in logged:
        assert 0 <= line["train/padding_pct"] < 40
        assert line["train/counted_pct_wiki"] + line["train/counted_pct_code"] == pytest.approx(100)
    evaluated = [line for line in lines if "eval/loss" in line][-1]
    low, high = sorted((evaluated["eval/loss_wiki"], evaluated["eval/loss_code"]))
    assert low <= evaluated["eval/loss"] <= high


def test_row_groups_are_tokenized_as_they_are_read_and_resumed_on_other_ranks(files, launch):
    words = (
        f"--data.path {files / 'code.parquet'} --data.text_column content --data.view parquet"
    ).split()
    words += [
        *"--data.streams 4 --data.pack off --run.dir run --train.global_batch_size 8".split(),
        *SMALL,
    ]
    succeeded(launch(0, *words, "--train.steps", 4))
    succeeded(launch.each(2, *words, "--train.steps", 8, "--data.workers", 1))
    summary = json.loads((files / "run/summary.json").read_text())
    assert (summary["steps"], summary["resumed_from_step"], summary["world_size"]) == (8, 4, 2)
    changed = launch(0, *words, "--train.steps", 12, "--data.streams", 8)
    assert changed.returncode == 65
    assert (
        "in the order 'parquet streams=4 shuffle_groups=2', this run in 'parquet streams=8"
        in changed.stderr
    )
