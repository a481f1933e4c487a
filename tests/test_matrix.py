"""The matrix: every way of running computes the steps of one process with the whole batch.

The default suite runs a covering set in which every two values that can be combined are; the slow
tests run every three and the whole product. How many cells ran, and which are void and why, is
shown at the end of the test run: `bash launch/test.sh -k matrix`; `-m slow -k matrix` for the
whole.
"""

import itertools
from functools import cache

import pytest
from ranks import on_ranks
from tiny import Tiny

from dist_amp.config.load import load_config
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.reference import STEPS, Reference

STRATEGIES = ("single", "ddp", "fsdp", "hsdp")
RANKS = (1, 2, 4)
PRECISIONS = ("fp32", "bf16", "fp16")
# (micro-batches per step, whether the fourth step is what is left of an epoch)
ACCUMULATIONS = ((1, False), (3, False), (4, False), (4, True))
CLIPS = ("off", "norm", "value")
OPTIMIZERS = ("sgd", "adamw")
VOID = {
    (strategy, ranks): "single is one process"
    if strategy == "single"
    else f"one rank has none to share {strategy} with"
    for strategy, ranks in itertools.product(STRATEGIES, RANKS)
    if (strategy == "single") != (ranks == 1)
}


@cache
def everything():
    """[(ranks, uneven weights, cell)], the void ones left out."""
    product = itertools.product(
        RANKS,
        (False, True),
        STRATEGIES,
        PRECISIONS,
        ACCUMULATIONS,
        CLIPS,
        (True, False),
        OPTIMIZERS,
    )
    return [
        (
            ranks,
            uneven,
            Cell(strategy, precision, optimizer, clip, fused, (accumulation,) * STEPS, partial),
        )
        for ranks, uneven, strategy, precision, (
            accumulation,
            partial,
        ), clip, fused, optimizer in product
        if (strategy, ranks) not in VOID
    ]


def values_of(entry):
    """What a cell is made of: (ranks, uneven, strategy, precision, accumulation, clip, path,
    optimizer).
    """
    ranks, uneven, cell = entry
    accumulation = (cell.accumulation[0], cell.partial)
    return (
        ranks,
        uneven,
        cell.strategy,
        cell.precision,
        accumulation,
        cell.clip_by,
        cell.fused,
        cell.optimizer,
    )


def combinations_of(entry, strength):
    return set(itertools.combinations(enumerate(values_of(entry)), strength))


@cache
def covering(strength):
    """A small set of cells in which every `strength` values that can be combined are, chosen
    greedily.
    """
    candidates = [(entry, combinations_of(entry, strength)) for entry in everything()]
    uncovered = set().union(*(covered for _, covered in candidates))
    chosen = []
    while uncovered:
        best, covered = max(candidates, key=lambda pair: len(pair[1] & uncovered))
        chosen.append(best)
        uncovered -= covered
    return chosen


def causes(world, uneven, cells):
    """What is wrong with each cell, on rank 0; the reference is computed once for all of them."""
    reference = Reference(
        load_config([], environ={}), world.device, Tiny(samples=300, uneven=uneven)
    )
    return [check_cell(world, reference, cell).cause for cell in cells]


def run_cells(entries, say):
    """Run all; print how many ran, how many are void and why, and fail with those that are wrong."""
    wrong = []
    for ranks, uneven in itertools.product(RANKS, (False, True)):
        cells = [cell for r, u, cell in entries if (r, u) == (ranks, uneven)]
        told = on_ranks(ranks, causes, uneven, cells, timeout_seconds=3600)[0]
        of = f"{ranks} rank{'s' if ranks > 1 else ''}, {'uneven' if uneven else 'uniform'} weights"
        wrong += [
            f"{of}, {cell}: {cause}" for cell, cause in zip(cells, told, strict=True) if cause
        ]
        say(f"{of}: {len(cells)} cells ran")
    each = len(PRECISIONS) * len(ACCUMULATIONS) * len(CLIPS) * 2 * len(OPTIMIZERS) * 2
    for (strategy, ranks), why in VOID.items():
        say(f"void: {strategy} on {ranks} rank{'s' if ranks > 1 else ''} ({each} cells): {why}")
    say(f"{len(entries)} cells ran, {len(wrong)} of them wrong; {each * len(VOID)} are void")
    assert not wrong, "\n".join(wrong)


# Few mistakes need more than three values at once to show.
@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_covering_set_of_the_matrix_computes_the_step_of_one_process(say, strength):
    run_cells(covering(strength), say)


PARTS = 48


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_the_whole_matrix_computes_the_step_of_one_process(say, part):
    run_cells(everything()[part::PARTS], say)


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(2, "fsdp"), pytest.param(4, "hsdp", marks=pytest.mark.slow)]
)
def test_the_matrix_holds_where_gradients_are_reduced_after_every_micro_batch(ranks, strategy):
    cells = [Cell(strategy, precision, accumulate_reduce="every") for precision in PRECISIONS]
    assert on_ranks(ranks, causes, True, cells)[0] == ["", "", ""]


@pytest.mark.parametrize("strength", [2, 3])
def test_a_covering_set_has_every_combination_of_values_and_the_whole_matrix_has_every_cell(
    strength,
):
    assert len(everything()) == 7 * 3 * 4 * 3 * 2 * 2 * 2
    of_all = set().union(*(combinations_of(entry, strength) for entry in everything()))
    assert (
        set().union(*(combinations_of(entry, strength) for entry in covering(strength))) == of_all
    )
