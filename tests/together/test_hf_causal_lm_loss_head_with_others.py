"""What test_hf_causal_lm_loss_head.py tests, with other features."""

import pytest
import torch
from ranks import on_ranks
from test_hf_causal_lm_loss_head import CHUNK, FP32, both_reductions, inputs, task_of
from tiny import make_run, take_steps

from dist_amp.verify.cells import capture


@both_reductions
def test_the_chunks_compile_as_one_graph(reduction):
    head, x, targets = inputs()
    head.chunk = CHUNK
    torch.compiler.reset()
    compiled = torch.compile(lambda *args: head(*args), fullgraph=True, backend="aot_eager")
    results = []
    for compute in (compiled, head):
        loss = compute(x, targets, reduction).sum()
        results.append([loss, *torch.autograd.grad(loss, [x, head.weight])])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def gradients(world, task, *words):
    run = make_run(world, task, "--train.micro_batch_size", 2, *FP32, *words)
    states = capture(run)
    take_steps(run, 1)
    run.parallel.module.eval()
    [batch] = next(run.data)[:1]
    values = {key: float(value) for key, value in task.metrics(run.model, batch).items()}
    return [state.gradients for state in states], values  # on rank 0 alone


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "single"),
        ("llama", "ddp"),
        ("llama", "fsdp"),
        ("llama_tied", "fsdp"),
        ("gpt2", "single"),
        ("mixtral", "fsdp"),
    ],
)
def test_a_language_model_gets_the_gradients_of_all_logits_at_once(name, strategy, tmp_path):
    ranks = 1 if strategy == "single" else 2
    words = ["--parallel.strategy", strategy]
    plain, chunked = (
        on_ranks(ranks, gradients, task_of(tmp_path, name, loss_chunk=chunk), *words)[0]
        for chunk in ("off", 5)
    )
    for key, true in plain[0][0].items():
        # Sums in another order: some roundings of 2^-24 of the largest.
        torch.testing.assert_close(chunked[0][0][key], true, rtol=0, atol=1e-6 * true.abs().max())
    assert chunked[1] == pytest.approx(plain[1], rel=1e-4)
