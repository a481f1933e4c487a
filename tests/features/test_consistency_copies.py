"""Core as test_copies.py tests it, with consistency."""

import torch
from test_copies import Encoding
from tiny import Tiny, make_run

from dist_amp.data import Padding
from dist_amp.world import World


class OfObjects(Tiny):
    """Batches that are objects with attributes, in place of dicts."""

    def collate(self, samples):
        return Encoding(torch.utils.data.default_collate(samples))

    def loss_sum(self, model, batch):
        return super().loss_sum(model, {"x": batch.x, "y": batch.y, "counts": batch.counts})


def test_the_main_job_trains_on_objects_and_compares_their_samples_between_ranks():
    from dist_amp.diagnostics.consistency import hash_samples
    from dist_amp.step import train_step

    run = make_run(World(), OfObjects(), "--data.workers", 1)
    first, second = next(run.data), next(run.data)
    assert hash_samples(first, run.world.device) != hash_samples(second, run.world.device)
    assert hash_samples([Padding(first[0])], run.world.device) == 0
    assert train_step(run, first).applied
    run.data.close()
