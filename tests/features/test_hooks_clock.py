"""Core as test_clock.py tests it, with hooks."""

from types import SimpleNamespace

import pytest
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from dist_amp.scaling import hooks, reduction


def parameters_of(world):
    """Of a small model after two steps, with and without FSDP2's private names."""
    results = []
    for renamed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if renamed:
                patch.setattr(hooks, "WAITS", ("renamed",))
                patch.setattr(hooks, "ENGINE", None)
                patch.setattr(reduction, "ENGINE", None)
            run = make_run(world, Tiny(), "--parallel.strategy", "fsdp", "--use_amp", "false")
            take_steps(run, 2)
            results.append([p.full_tensor().tolist() for p in run.parallel.parameters])
    return results


def test_steps_are_the_same_where_torch_has_other_private_names():
    for without, named in on_ranks(2, parameters_of):
        assert without == named


@pytest.mark.parametrize("on_gpu", [False, True])
def test_on_a_gpu_what_only_queues_a_gather_is_no_wait(monkeypatch, on_gpu):
    group = SimpleNamespace(**dict.fromkeys(hooks.WAITS, lambda: None))
    before = dict(vars(group))
    monkeypatch.setattr(hooks, "fsdp_groups", lambda model: [group])
    hooks.time_gathers(SimpleNamespace(), SimpleNamespace(on_gpu=on_gpu))
    waits = [name for name, method in before.items() if getattr(group, name) is not method]
    expected = ["unshard", "wait_for_unshard", "post_backward", "finalize_backward"]
    assert waits == expected[on_gpu:]
