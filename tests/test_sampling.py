"""The sample at the end of a run, of a sharded model too."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from dist_amp.supervise import sampling
from dist_amp.verify.collectives import Counting

WORDS = ["--use_amp", "false", "--optim.ema", 0.5, "--train.global_batch_size", 16]


class Sampled(Tiny):
    def sample(self, model):
        out = [model(torch.full((1, 8), float(n))).item() for n in range(10)]
        return " ".join(f"{value:.4f}" for value in out)


def sampled(world, strategy, free=None):
    """(the sample, how many gathers it took, what was printed)."""
    run = make_run(world, Sampled(), "--parallel.strategy", strategy, *WORDS)
    take_steps(run, 2)
    found = []
    run.metrics.write_sample = lambda step, sample: found.append(sample)
    old = sampling.free_bytes
    if free is not None:
        sampling.free_bytes = lambda device, ranks: free
    try:
        with redirect_stdout(io.StringIO()) as output, Counting() as counting:
            sampling.write_sample(run)
    finally:
        sampling.free_bytes = old
    gathers = sum(times for one, times in counting.collectives.items() if one.kind == "all_gather" and one.bytes_in > 8)
    take_steps(run, 1)  # the model is as it was
    return found, gathers, output.getvalue()


def test_a_sharded_model_is_gathered_once_per_sample_and_not_once_per_token():
    ((expected, _, _),) = on_ranks(1, sampled, "single")
    for found, gathers, _ in on_ranks(2, sampled, "fsdp"):
        assert found == expected
        assert gathers == 3  # two blocks and the head; ten tokens


def test_a_sample_of_a_model_that_does_not_fit_is_skipped_and_the_command_that_makes_it_is_named():
    for rank, (found, gathers, output) in enumerate(on_ranks(2, sampled, "fsdp", 100.0)):
        assert not found
        assert not gathers
        text = f"python -m dist_amp.sample {Path('unused')} makes one on one device"
        assert (text in output) == (rank == 0)
