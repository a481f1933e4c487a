"""What test_image_text.py tests, with other features."""

import pytest
import test_image_text
import torch
from ranks import on_ranks
from test_image_text import TEMPLATE, questions, task_of
from tiny import make_run, save, take_steps
from tiny_hf import QUICK, write_rows
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
)

from dist_amp.commands import export
from dist_amp.step import evaluate
from dist_amp.tasks.loss_head import LossHead
from dist_amp.verify import __main__ as verify
from dist_amp.verify.cells import capture

# Fixtures.
folder = test_image_text.folder

TARGET = "dist_amp.tasks.image_text:ImageText"


def gradients(world, folder, chunk, options, strategy):
    """Of a step; and the evaluation."""
    task = task_of(folder, questions(), loss_chunk=chunk, **options)
    run = make_run(world, task, *QUICK, "--parallel.strategy", strategy, "--eval.batches", 1)
    head = run.parallel.module.get_output_embeddings()
    assert isinstance(head, LossHead) == (chunk != "off")
    states = capture(run)
    take_steps(run, 1)
    return [state.gradients for state in states], evaluate(run)  # on rank 0 alone


@pytest.mark.parametrize(("options", "strategy"), [({}, "fsdp"), ({"lora_rank": 2}, "ddp")])
def test_the_loss_in_chunks_has_the_gradients_of_all_logits_at_once(options, strategy, folder):
    plain, chunked = (
        on_ranks(2, gradients, folder, chunk, options, strategy)[0] for chunk in ("off", 37)
    )
    largest = max(gradient.abs().max() for gradient in plain[0][-1].values())
    for key, true in plain[0][-1].items():
        # Sums in another order: some tens of roundings of 2^-24 of the largest. By a key's bias it
        # is 0 but for roundings of others.
        size = max(true.abs().max(), 1e-3 * largest)
        torch.testing.assert_close(chunked[0][-1][key], true, rtol=0, atol=4e-6 * size)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-4)


def test_an_export_opens_in_transformers_with_its_processor(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_rows(folder / "rows.jsonl", questions())
    words = ["--task.target", TARGET, "--task.args.model", folder, "--run.dir", "run"]
    words += ["--data.path", folder / "rows.jsonl", "--task.args.lora_rank", 2]
    run = make_run(None, None, *QUICK, *words, "--train.steps", 4, "--optim.lr", 0.01)
    take_steps(run, 2)
    save(run)
    batch = run.data.last_step[0][0]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    with torch.no_grad():
        expected = run.parallel.module.eval()(**inputs).logits
    assert export.main(["run", "--out", "out", "--format", "hf", "--merge"]) == 0
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained("out")(**inputs).logits
    # W x + B A x and (W + B A) x round differently: some 2^-24 of values of about 1.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert AutoProcessor.from_pretrained("out").chat_template == TEMPLATE


@pytest.mark.slow
def test_verify_passes_on_one_and_two_ranks(folder, capfd):
    write_rows(folder / "rows.jsonl", questions(300))
    words = f"--task.target {TARGET} --task.args.model {folder} --data.path {folder}/rows.jsonl"
    status = verify.main([*words.split(), "--world_sizes", "1,2", "--precisions", "fp32"])
    assert status == 0, capfd.readouterr().out
