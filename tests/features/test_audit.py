"""`debug.audit_every`: silent corruption is found and its rank named, and nothing else is."""

import random
import re
from collections import Counter
from itertools import count
from unittest.mock import patch

import pytest
import torch
from bit_exact_models import Augmented
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run, parameters_of, take_steps

from dist_amp.config.load import load_config
from dist_amp.diagnostics.audit import Audit, check_settings, choose, verdict
from dist_amp.diagnostics.trace import BITS
from dist_amp.errors import NumericsError
from dist_amp.world import World, local

EXACT = ["--parallel.bit_exact", "true", "--train.global_batch_size", 16]
EXACT += ["--train.micro_batch_size", 2, "--train.steps", 1000]
EACH = ["--debug.audit_every", 1]
DDP, FSDP, HSDP = (["--parallel.strategy", name] for name in ("ddp", "fsdp", "hsdp"))
FP32 = ["--use_amp", "false"]
FP16 = ["--precision.dtype", "fp16", "--precision.scaler.init_scale"]


@torch.no_grad()
def flip(tensor):
    """Flip one bit of one element: in the mantissa, high enough to change a result."""
    bits = tensor.view(-1)[:1].view(BITS[tensor.element_size()])
    bits.bitwise_xor_(1 << (9 * tensor.element_size() // 2))


def in_product(run):
    """In the first call alone: the gradients differ by it too."""
    calls = count()

    def hook(module, x, output):
        output = output.clone()
        if next(calls) == 0:
            flip(output)
        return output

    run.parallel.module[0][0].register_forward_hook(hook)


def in_weight(run):
    flip(local(run.parallel.module[1][0].weight))


def trained(world, task, words, steps=3, plant=None, culprit=0):
    """(what ends a run, its warnings, its parameters); plant(run) before its last step, on rank
    `culprit` alone.
    """
    run = make_run(world, task, *EXACT, *words)
    if "--debug.audit_every" in words:
        run.observers.add(Audit(run))
    warnings = []
    error = ""
    with patch.object(World, "warn", lambda world, text: warnings.append(text)):
        try:
            take_steps(run, steps - 1)
            if plant is not None and world.rank == culprit:
                plant(run)
            take_steps(run, 1)
        except NumericsError as caught:
            error = str(caught)
    return error, warnings, parameters_of(run)


OF_ALL = r"loss, gradient of 0.0.weight, gradient .* faulty: rank {} \([^()]*\); resume"
OF_FOUR = r"; faulty: rank 2 \([^()]*\); the parameter 1.0.weight is not the same on"
OF_REPLICAS = "can't be told: .*; the parameter 1.0.weight is not the same on ranks 0 and 2"


@pytest.mark.parametrize(
    ("ranks", "words", "steps", "plant", "culprit", "said"),
    [
        (2, [*DDP, *FP32], 3, in_product, 0, OF_ALL.format(0)),
        (2, [*FSDP, *FP32], 3, in_product, 1, OF_ALL.format(1)),
        (2, [*DDP, *FP16, 2.0**40], 1, in_product, 1, r"; faulty: rank 1 \("),  # a skipped step
        (4, [*DDP, *FP32], 3, in_weight, 2, OF_FOUR),
        (4, [*HSDP, *FP32], 3, in_weight, 0, OF_REPLICAS),
    ],
)
def test_a_flipped_bit_is_found_and_the_rank_named_as_far_as_can_be_known(
    ranks, words, steps, plant, culprit, said
):
    results = on_ranks(ranks, trained, Tiny(), [*EACH, *words], steps, plant, culprit)
    assert len({error for error, *_ in results}) == 1
    for error, warnings, _ in results:
        assert warnings == []
        assert error.startswith(f"audit of step {steps}, micro-batch ")
        assert re.search(said, error), error


class Unseeded(Tiny):
    """Noise from the system's random numbers, which no seed repeats."""

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * random.SystemRandom().random()


@pytest.mark.bad_input("an audit of a task that draws from generators that it does not seed")
def test_a_task_that_is_not_repeatable_is_no_corruption():
    for error, (warning,), _ in on_ranks(2, trained, Unseeded(), [*EACH, *DDP], 4):
        assert not error
        assert ": loss, gradient of " in warning
        assert "the task is not repeatable" in warning
    good, other_samples = (0, 1), (9, 1)
    assert verdict([0, 1, 0, 1], [other_samples, good, good, good], "ab") == ""


@pytest.mark.parametrize("words", [[*DDP, *FP16, 2.0**24], [*FSDP, "--precision.dtype", "bf16"]])
def test_an_audited_run_has_the_bits_of_one_that_is_not(words):
    """Dropout, augmentation, idle experts, accumulation, skips, and no alarm; 27 samples: the
    second step is padded.
    """
    task = Augmented(samples=27)
    expected = on_ranks(2, trained, task, words)
    for mine, other in zip(on_ranks(2, trained, task, [*words, *EACH]), expected, strict=True):
        assert mine[:2] == ("", [])
        torch.testing.assert_close(mine[2], other[2], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("words", [DDP, FSDP])
def test_a_thousand_clean_audits_give_no_alarm(words):
    words = [*EACH, *words, "--train.steps", 1000, "--train.global_batch_size", 4]
    for error, warnings, _ in on_ranks(2, trained, Tiny(), words, 1000, timeout_seconds=600):
        assert (error, warnings) == ("", [])


def test_one_step_of_each_window_is_chosen_by_seed_and_step_alone():
    chosen = [choose(7, 10, step, 4, 3) for step in range(3000)]
    assert all(sum(c is not None for c in chosen[i : i + 10]) == 1 for i in range(0, 3000, 10))
    # Each place, micro-batch and rank comes about equally often.
    assert len({step % 10 for step, choice in enumerate(chosen) if choice}) == 10
    kinds = Counter(filter(None, chosen))
    assert set(kinds) == {(number, shift) for number in range(3) for shift in (1, 2, 3)}
    # Binomial: 33 expected, standard deviation 5.4; five of them.
    assert max(kinds.values()) < 60
    assert chosen != [choose(8, 10, step, 4, 3) for step in range(3000)]


@pytest.mark.bad_input("an audit without bit_exact, on one process, or on devices of two kinds")
@pytest.mark.parametrize(
    ("words", "kinds", "said"),
    [
        (EXACT, "AA", ""),
        (EXACT, "AB", "debug.audit_every=1 needs ranks on equal devices, but they are on A, B; "),
        ([], "AA", "debug.audit_every=1 needs parallel.bit_exact=true"),
        (EXACT, "A", "debug.audit_every=1 needs another rank"),
    ],
)
def test_where_equal_bits_can_not_be_expected_the_audit_is_refused(words, kinds, said):
    config = load_config([str(word) for word in [*EACH, *words]], environ={})
    world = World(rank=0, local_rank=0, world_size=len(kinds), local_world_size=len(kinds))
    with patch.object(World, "gather", lambda world, kind: [*kinds]):
        if said:
            assert message_of(64, check_settings, config, world).startswith(said)
        else:
            check_settings(config, world)
