"""The blocks of a model that names none: its repeated layers, those of every stack, and never one
inside another.
"""

from collections import Counter

import pytest
from tiny import Tiny, variant
from torch import nn

from dist_amp.errors import ConfigError
from dist_amp.scaling.blocks import find_blocks, pick_blocks
from dist_amp.world import World

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT["intermediate_size"] = 64


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))

    def forward(self, x):
        return self.inner(x)


class DecoderBlock(Block):
    pass


class Experts(Block):
    def __init__(self):
        super().__init__()
        self.experts = layers(Block, 4)


class Stage(Block):
    """Blocks of one width, which the next stage doubles."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(Block(width), Block(width), nn.Linear(width, 2 * width))


def naming(*blocks):
    return variant(blocks=lambda model: blocks)


def layers(cls, times):
    return nn.ModuleList(cls() for _ in range(times))


MODELS = {
    "llama": (llama, {"LlamaDecoderLayer": 2}),
    "layers_and_head": (
        lambda: nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 300)),
        {"Block": 3},
    ),
    "two_stacks": (
        lambda: nn.ModuleDict({"encoder": layers(Block, 2), "decoder": layers(DecoderBlock, 5)}),
        {"Block": 2, "DecoderBlock": 5},
    ),
    "experts": (lambda: nn.ModuleDict({"layers": layers(Experts, 2)}), {"Experts": 2}),
    "stages": (lambda: nn.Sequential(Stage(8), Stage(16), Stage(32)), {"Block": 6}),
    "lists_in_a_list": (
        lambda: nn.ModuleList([layers(Block, 2), layers(Block, 2)]),
        {"Block": 4},
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        {"Linear": 2},
    ),
    "one_layer": (
        lambda: nn.ModuleList([layers(Experts, 1), nn.ModuleList([nn.Linear(8, 1)])]),
        {"Experts": 1},
    ),
    "none": (lambda: nn.Linear(8, 1), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_repeated_layers_of_a_model_are_its_blocks_and_none_lies_in_another(name, capsys):
    build, expected = MODELS[name]
    model = build()
    blocks = pick_blocks("fsdp", Tiny(), model, World(world_size=2))
    assert blocks == find_blocks(model)
    assert Counter(type(block).__name__ for block in blocks) == expected
    for block in blocks:
        assert not (set(block.modules()) - {block}) & set(blocks)
    held = sum(p.numel() for block in blocks for p in block.parameters())
    share = 100 * held / sum(p.numel() for p in model.parameters())
    counts = ", ".join(f"{count} x {kind}" for kind, count in expected.items()) or "none"
    assert f"blocks: {counts}, {share:.0f} % of parameters\n" in capsys.readouterr().out


def test_a_layer_whose_weight_is_used_elsewhere_too_is_no_block_and_one_that_runs_twice_is_one():
    layer = Block()
    model = nn.Sequential(layer, Block(), layer)
    assert find_blocks(model) == [layer, model[1]]
    model = nn.Sequential(*layers(Block, 5), nn.Linear(8, 32))
    model[5].weight = model[0].inner[0].weight
    assert find_blocks(model) == list(model[1:5])
    model[2].inner = model[1].inner
    assert not {model[1], model[2]} & set(find_blocks(model))


@pytest.mark.bad_input("blocks that hold less than half of the parameters")
def test_blocks_that_hold_less_than_half_of_the_parameters_get_a_warning_with_what_to_do(capsys):
    model = nn.Sequential(nn.Embedding(1000, 8), *layers(Block, 2))
    pick_blocks("fsdp", Tiny(), model, World(world_size=2))
    said = capsys.readouterr().err
    assert "layers found in the model hold only 12 % of its parameters" in said
    assert "return the model's layers from `def blocks(self, model)` in the task" in said
    pick_blocks("fsdp", naming(model[1]), model, World(world_size=2))
    assert not capsys.readouterr().err, "the task's own choice"


@pytest.mark.bad_input(
    "a block that shares a parameter with the rest of the model, under fsdp or hsdp"
)
def test_a_named_block_that_shares_a_parameter_with_the_rest_can_not_be_sharded():
    model = nn.Sequential(nn.Embedding(16, 8), Block(), nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    said = "the parameter 0.weight is also used outside of its block, and fsdp can't"
    with pytest.raises(ConfigError, match=said):
        pick_blocks("fsdp", naming(model[0], model[1]), model, World(world_size=2))
    assert pick_blocks("ddp", naming(model[0]), model, World(world_size=2)) == [model[0]]
