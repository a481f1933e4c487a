"""The blocks of a model that names none: its repeated layers, those of every stack, and never one
inside another.
"""

from collections import Counter

import pytest
from torch import nn

from dist_amp.errors import ConfigError
from dist_amp.scaling.blocks import find_blocks, pick_blocks
from dist_amp.world import World

TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT["intermediate_size"] = 64
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}


def hugging_face(name, settings):
    """A tiny model of transformers from its settings, with random weights."""
    cls = getattr(pytest.importorskip("transformers"), name)
    return cls(cls.config_class(**settings))


class Task:
    """It names no blocks, or these."""

    def __init__(self, *blocks):
        if blocks:
            self.blocks = lambda model: list(blocks)


class Layer(nn.Module):
    def forward(self, x):
        return x


class Block(Layer):
    def __init__(self, width=8):
        super().__init__()
        layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        self.inner = nn.Sequential(*layers)


class DecoderBlock(Block):
    pass


class Experts(Layer):
    """A layer that is nearly all experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))


class Stage(Layer):
    """Blocks of one width, which the next stage doubles."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.widen = nn.Linear(width, 2 * width)


class Stacks(nn.Module):
    def __init__(self, **lists):
        super().__init__()
        for name, layers in lists.items():
            self.add_module(name, nn.ModuleList(layers))


def repeat(cls, times, *args):
    return [cls(*args) for _ in range(times)]


LIST = nn.ModuleList
MODELS = {
    "llama": (lambda: hugging_face("LlamaForCausalLM", TEXT), {"LlamaDecoderLayer": 2}),
    "t5": (lambda: hugging_face("T5ForConditionalGeneration", T5), {"T5Block": 4}),
    "layers_and_head": (
        lambda: nn.Sequential(*repeat(Block, 3), nn.Linear(8, 300)),
        {"Block": 3},
    ),
    "two_stacks": (
        lambda: Stacks(encoder=repeat(Block, 2), decoder=repeat(DecoderBlock, 5)),
        {"Block": 2, "DecoderBlock": 5},
    ),
    "experts": (lambda: Stacks(layers=repeat(Experts, 2)), {"Experts": 2}),
    "stages": (lambda: Stacks(stages=[Stage(8), Stage(16), Stage(32)]), {"Block": 6}),
    "lists_in_a_list": (
        lambda: Stacks(towers=[LIST(repeat(Block, 2)), LIST(repeat(Block, 2))]),
        {"Block": 4},
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        {"Linear": 2},
    ),
    "one_layer": (lambda: Stacks(layers=[Experts()], heads=[nn.Linear(8, 1)]), {"Experts": 1}),
    "none": (lambda: nn.Linear(8, 1), {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_repeated_layers_of_a_model_are_its_blocks_and_none_lies_in_another(name, capsys):
    build, expected = MODELS[name]
    model = build()
    blocks = pick_blocks("fsdp", Task(), model, World(world_size=2))
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
    model = nn.Sequential(*repeat(Block, 5), nn.Linear(8, 32))
    model[5].weight = model[0].inner[0].weight
    assert find_blocks(model) == list(model[1:5])
    model[2].inner = model[1].inner
    assert not {model[1], model[2]} & set(find_blocks(model))


@pytest.mark.bad_input("blocks that hold less than half of the parameters")
def test_blocks_that_hold_less_than_half_of_the_parameters_get_a_warning_with_what_to_do(capsys):
    model = nn.Sequential(nn.Embedding(1000, 8), *repeat(Block, 2))
    pick_blocks("fsdp", Task(), model, World(world_size=2))
    out, err = capsys.readouterr()
    assert out == "blocks: 2 x Block, 12 % of parameters\n"
    assert err == (
        "warning: the repeated layers that were found hold 12 % of the parameters, and the rest "
        "is one unit; name the model's layers by `def blocks(self, model)` in the task\n"
    )
    pick_blocks("fsdp", Task(model[1]), model, World(world_size=2))
    assert not capsys.readouterr().err, "the task's own choice"


@pytest.mark.bad_input(
    "a block that shares a parameter with the rest of the model, under fsdp or hsdp"
)
def test_a_named_block_that_shares_a_parameter_with_the_rest_can_not_be_sharded():
    model = nn.Sequential(nn.Embedding(16, 8), Block(), nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    said = "the parameter 0.weight is also used outside of its block, and fsdp can't"
    with pytest.raises(ConfigError, match=said):
        pick_blocks("fsdp", Task(model[0], model[1]), model, World(world_size=2))
    assert pick_blocks("ddp", Task(model[0]), model, World(world_size=2)) == [model[0]]
