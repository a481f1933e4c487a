"""The matrix: every way of running computes the steps of one process with the whole batch.

The default suite runs a covering set on one and two ranks in which every two values that can be
combined are; the slow tests run every three, four ranks and the whole product. How many cells ran
is shown at the end: `bash launch/test.sh -k matrix`; `-m slow -k matrix` for the whole.
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

LAYOUTS = [("single", 1)]  # one process; the others have ranks to share with
LAYOUTS += [(strategy, ranks) for strategy in ("ddp", "fsdp", "hsdp") for ranks in (2, 4)]
# layout, uneven weights, precision, optimizer, clip_by, fused, when gradients are reduced,
# micro-batches per step
VALUES = (
    LAYOUTS,
    (False, True),
    ("fp32", "bf16", "fp16"),
    ("sgd", "adamw"),
    ("off", "norm", "value"),
    (True, False),
    ("last", "every"),
    (1, 3, 4),
)
EVERYTHING = [*itertools.product(*VALUES)]


def combinations_of(entry, strength):
    """Of its values, with the ranks apart from the strategy."""
    (strategy, ranks), *rest = entry
    return set(itertools.combinations(enumerate((strategy, ranks, *rest)), strength))


@cache
def covering(strength, most_ranks):
    """A small set in which every `strength` values that can be combined are, chosen greedily."""
    entries = [entry for entry in EVERYTHING if entry[0][1] <= most_ranks]
    candidates = [(entry, combinations_of(entry, strength)) for entry in entries]
    uncovered = set().union(*(covered for _, covered in candidates))
    chosen = []
    while uncovered:
        best, covered = max(candidates, key=lambda pair: len(pair[1] & uncovered))
        chosen.append(best)
        uncovered -= covered
    return chosen


def causes(world, uneven, cells):
    """What is wrong with each cell, on rank 0; the reference is computed once for all of them."""
    task = Tiny(samples=300, uneven=uneven)
    measured = Reference(load_config([], environ={}), world.device, task).measured(VALUES[2])
    found = []
    for words, cell in cells:
        reference = Reference(load_config(words, environ={}), world.device, task, measured)
        found.append(check_cell(world, reference, cell).cause)
    return found


def run_cells(entries, say):
    """Run all, print how many ran, and fail with those that are wrong."""
    wrong = []
    for ranks, uneven in itertools.product((1, 2, 4), (False, True)):
        cells = []
        for (strategy, size), of_uneven, precision, optimizer, *settings, accumulation in entries:
            if (size, of_uneven) == (ranks, uneven):
                clip_by, fused, reduces = settings
                words = ["--train.clip_by", clip_by, "--optim.fused", str(fused).lower()]
                words += ["--parallel.accumulate_reduce", reduces]
                cell = Cell(strategy, precision, optimizer, (accumulation,) * STEPS)
                cells.append((words, cell))
        if not cells:
            continue
        told = on_ranks(ranks, causes, uneven, cells, timeout_seconds=3600)[0]
        pairs = zip(cells, told, strict=True)
        wrong += [f"{ranks} ranks, {cell}: {cause}" for cell, cause in pairs if cause]
        say(f"{ranks} ranks, uneven weights {uneven}: {len(cells)} cells ran")
    say(f"{len(entries)} cells ran, {len(wrong)} of them wrong; void: a shared strategy on 1 rank")
    assert not wrong, "\n".join(wrong)


# Few mistakes need more than three values at once to show.
@pytest.mark.parametrize(
    ("strength", "most_ranks"), [(2, 2), pytest.param(3, 4, marks=pytest.mark.slow)]
)
def test_a_covering_set_of_the_matrix_computes_the_step_of_one_process(say, strength, most_ranks):
    run_cells(covering(strength, most_ranks), say)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(48))
def test_the_whole_matrix_computes_the_step_of_one_process(say, part):
    run_cells([entry for entry in EVERYTHING if "every" not in entry][part::48], say)
