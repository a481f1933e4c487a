"""Core as test_optim.py tests it, with frozen."""

from tiny import Tiny, make_run
from torch import nn

from dist_amp.world import World


class TiedAndFrozen(Tiny):
    def build_model(self):
        layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1)]
        layers[1].weight = layers[0].weight
        layers[3].requires_grad_(False)
        return nn.Sequential(*layers)

    def groups(self, model):
        tied = {"name": "a", "params": ["1.weight", "0.weight", *model[3].parameters()]}
        return [tied, {"name": "b", "params": ["*.bias", "2.weight"]}]


def test_a_tied_parameter_has_both_its_names_and_a_frozen_one_is_in_no_group():
    run = make_run(World(), TiedAndFrozen())
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [1, 4]
