"""A dataset's fingerprint, by which a resumed run recognises its data."""

import hashlib

import torch

from dist_amp.data import Batches
from dist_amp.runtime.loader import read
from dist_amp.runtime.nested import leaves
from dist_amp.runtime.random_state import random_state, seed_all, set_random_state
from dist_amp.world import World

PLAIN = (str, bytes, int, float, bool, type(None))


def fingerprint(data: Batches, world: World) -> str:
    """Rank 0's, on every rank; computed once, with the random generators left as they are. Every rank calls it."""
    if not data.fingerprint:
        before = random_state(world.device)
        data.fingerprint = world.from_main(dataset_hash(data) if world.is_main else "")
        set_random_state(before, world.device)
    return data.fingerprint


def dataset_hash(data: Batches) -> str:
    """The dataset's own `fingerprint`, else a hash of 64 samples evenly spread over it."""
    if isinstance(own := getattr(data.fetch.dataset, "fingerprint", None), str):
        return own
    digest = hashlib.sha256()
    length = data.plan.length
    for index in sorted({round(i * (length - 1) / 63) for i in range(64)}):
        seed_all(index)  # the same random augmentations every time
        try:
            sample = read(data.fetch.dataset, (index,))
        except Exception:  # the step that needs the sample raises the error
            sample = ["can't be read"]
        for leaf in leaves(sample):
            if isinstance(leaf, torch.Tensor):
                digest.update(leaf.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif hasattr(leaf, "tobytes"):  # arrays and pictures
                digest.update(leaf.tobytes())
            else:
                digest.update((repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__name__).encode())
    return digest.hexdigest()[:16]
