"""metrics.fingerprint: hashes of parameters and gradients, equal in any layout."""

import json

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, log_row, make_run, take_steps, variant
from torch import nn

from dist_amp.diagnostics.fingerprint import Fingerprint
from dist_amp.diagnostics.trace import hash_tensor
from dist_amp.world import World

WORDS = ["--metrics.fingerprint", 2, "--train.micro_batch_size", 4, "--precision.use_amp", "false"]


def hashed_steps(world, task, steps, *words):
    """Steps as in the main job: (the fingerprints that rank 0 would write, the steps' losses)."""
    run = make_run(world, task, *WORDS, *words)
    fingerprint = Fingerprint(run)
    run.observers.add(fingerprint)
    losses = [report.loss_sum.item() for report in take_steps(run, steps)]
    return fingerprint.tags(log_row(run)).get("fingerprints", {}), losses


def test_the_first_and_every_nth_step_have_hashes_of_each_module_and_no_step_changes():
    written, losses = hashed_steps(World(), Tiny(), 5)
    plain = take_steps(make_run(World(), Tiny(), *WORDS), 5)
    assert losses == [report.loss_sum.item() for report in plain]
    assert list(written) == ["1", "2", "4"]
    for hashes in written.values():
        assert list(hashes) == ["parameters", "gradients"]
        for kind in hashes.values():
            assert list(kind) == ["0.0", "1.0", "2"]
            assert all(len(text) == 16 and int(text, 16) for text in kind.values())
    json.dumps(written)


def test_equal_bits_have_equal_hashes_on_any_ranks_and_strategy():
    exact = ["--parallel.bit_exact", "true", "--train.global_batch_size", 16]
    expected, _ = hashed_steps(World(), Tiny(), 1, *exact)
    for ranks, strategy in ((2, "ddp"), (2, "fsdp"), (4, "hsdp")):
        words = ["--parallel.strategy", strategy, *exact]
        first, *others = on_ranks(ranks, hashed_steps, Tiny(), 1, *words)
        assert first[0] == expected
        assert not any(written for written, _ in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hash_sees_one_flipped_bit_and_two_exchanged_elements_and_those_of_shards_add_up(dtype):
    tensor = torch.randn(33, 5).to(dtype)
    expected = hash_tensor(tensor)
    flipped = tensor.clone()
    flipped.view(torch.uint8)[32, 4] ^= 1
    for other in (flipped, tensor.flip(0), -tensor):
        assert hash_tensor(other) != expected
    parts = [hash_tensor(tensor[first : first + 9], first * 5) for first in range(0, 33, 9)]
    assert sum(parts) == expected


def test_hashes_are_those_of_earlier_versions_with_whose_runs_diff_compares():
    assert hash_tensor(torch.arange(10.0)) == 5818009741938868526
    assert hash_tensor(torch.arange(10).bfloat16()) == -3861425918515962914


def test_a_skipped_step_has_its_parameters_hashes():
    written, _ = hashed_steps(World(), Overflow(bad=tuple(range(64))), 1)
    assert "parameters" in written["1"]


def test_a_parameter_without_dimensions_has_a_hash():
    def build_model():
        model = Tiny().build_model()
        model.scale = nn.Parameter(torch.tensor(1.0))
        return model

    written, _ = hashed_steps(World(), variant(build_model=build_model), 1)
    assert set(written["1"]["parameters"]) == {"0.0", "1.0", "2", "scale"}
