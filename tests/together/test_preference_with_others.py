"""What test_preference.py tests, with other features."""

import pytest
import test_preference
import torch
from peft import AutoPeftModelForCausalLM
from ranks import on_ranks
from test_preference import dpo, pairs
from tiny import make_run, save, take_steps
from tiny_hf import QUICK, make_model, make_tokenizer, write_rows
from transformers import AutoModelForCausalLM

from dist_amp.commands import export
from dist_amp.step import evaluate
from dist_amp.tasks.loss_head import LossHead
from dist_amp.verify import __main__ as verify
from dist_amp.verify.cells import capture

# Fixtures.
folder = test_preference.folder

TARGET = "dist_amp.tasks.preference:DPO"


def second_gradients(world, folder, chunk, options, words):
    """Of the second step, when the policy is no longer the reference; and the evaluation."""
    task = dpo(folder, pairs(), beta=0.5, loss_chunk=chunk, pad_to_multiple_of=1, **options)
    words = ["--optim.lr", 0.05, "--optim.name", "sgd", "--train.accumulation_steps", 2, *words]
    run = make_run(world, task, *QUICK, "--eval.batches", 1, *words)
    heads = [part for part in run.parallel.module.modules() if isinstance(part, LossHead)]
    assert bool(heads) == (chunk != "off")
    states = capture(run)
    take_steps(run, 2)
    return [state.gradients for state in states], evaluate(run)  # on rank 0 alone


RECOMPUTED = "--parallel.strategy fsdp --parallel.activation_checkpointing full"
COMPILED = " --compile.blocks true --compile.mode aot_eager"


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({}, "llama", "--parallel.strategy ddp"),
        ({}, "llama_tied", RECOMPUTED),  # the head is in the root's unit
        ({"lora_rank": 2}, "llama", "--parallel.strategy fsdp"),  # a frozen head
        pytest.param({}, "llama", RECOMPUTED + COMPILED, marks=pytest.mark.slow),
    ],
)
def test_the_loss_in_chunks_has_the_gradients_of_all_logits_at_once(options, name, words, tmp_path):
    make_tokenizer(make_model(tmp_path, name))
    plain, chunked = (
        on_ranks(2, second_gradients, tmp_path, chunk, options, words.split())[0]
        for chunk in ("off", 5)
    )
    for key, true in plain[0][-1].items():
        # Sums in another order, of two steps: some roundings of 2^-24 of the largest.
        torch.testing.assert_close(chunked[0][-1][key], true, rtol=0, atol=4e-6 * true.abs().max())
    assert chunked[1] == pytest.approx(plain[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("rank", "merge"), [(0, ""), (2, ""), (2, "--merge")])
def test_an_export_is_the_policy_alone(rank, merge, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = "--train.steps 4 --optim.lr 0.01 --run.dir run --data.path rows.jsonl"
    words += f" --task.target {TARGET} --task.args.model {folder} --task.args.lora_rank {rank}"
    write_rows(folder / "rows.jsonl", pairs())
    run = make_run(None, None, *QUICK, *words.split())
    take_steps(run, 2)
    save(run)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = run.parallel.module.policy(input_ids=ids).logits
    assert export.main(f"run --out out --format hf {merge}".split()) == 0
    kind = AutoPeftModelForCausalLM if rank and not merge else AutoModelForCausalLM
    model = kind.from_pretrained("out")
    with torch.no_grad():
        # float32 rounds logits of about 1 by 2^-24, in several products.
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_verify_passes_on_one_and_two_ranks(rank, folder, capfd):
    write_rows(folder / "rows.jsonl", pairs(300))
    words = f"--task.target {TARGET} --task.args.model {folder} --data.path {folder}/rows.jsonl"
    words += f" --world_sizes 1,2 --precisions fp32 --task.args.lora_rank {rank}"
    status = verify.main(words.split())
    assert status == 0, capfd.readouterr().out
