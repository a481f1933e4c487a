"""The shipped language model: its data, network, settings, initial weights and samples."""

import math

import pytest
import torch
from conftest import ROOT
from messages import message_of
from ranks import on_ranks
from tiny import Changed

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.config.text import to_toml
from dist_amp.scaling.meta import build_on_ranks, placement
from dist_amp.tasks.causal_lm import GPT, rotary_table, rotate

pytestmark = pytest.mark.usefixtures("own_cache")
GPT_124M = ROOT / "configs" / "gpt_124m.toml"


def load(*words):
    return load_config(list(map(str, words)), {})


def test_a_text_is_kept_as_it_is_even_where_it_looks_like_a_table(tmp_path):
    path = tmp_path / "mine.toml"
    for text in ("true", "--dashes first", "two\nlines", "a = 'b' \"c\" # d"):
        config = load(f"--task.args.prompt={text}", "--eval.every=off")
        assert config.task.args.prompt == text
        path.write_text(to_toml(config))
        assert load("--config", path) == config
    path.write_text('[task.args]\nprompt = """\n[train]\nsteps = 9\n"""\n[train]\nsteps = 0')
    assert f"steps=0 in {path} must" in message_of(64, load, "--config", path)


@pytest.mark.bad_input("a task that can't be imported or lacks a method")
@pytest.mark.bad_input("a column of the text that is missing or holds no text, or a missing split")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--task.args.heads 3", 64, "width=128 must be a multiple of 2 x heads=3"),
        ("--task.target tiny", 64, "task.target=tiny must be module:Class or path/to/file.py:Cla"),
        ("--task.target missing:Mine", 64, "No module named 'missing'"),
        ("--task.target tiny:Tinny", 64, "no class Tinny in tiny, which has"),
        ("--task.target tiny:LacksWeight", 64, "lacks the method weight; add `def weight(self, "),
        ("--data.text_column body", 65, "data.text_column=body or "),
        ("--data.text_column length", 65, "the column length holds int, not text"),
        ("--data.split trian", 65, "the dataset has train"),
        ("--data.validation_split 0.99", 65, "data.validation_split=0.99 leaves none of 40 rows"),
    ],
)
def test_what_no_task_or_dataset_can_be_built_of_is_refused(words, status, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "some text", "length": 9}\n' * 40)
    config = ["--data.path", tmp_path, *words.split(" ")]
    text = message_of(status, lambda: build_task(load(*config)).build_dataset("train"))
    assert message in text
    assert "Annotated" not in text, "imported classes are not suggested"


def test_a_prediction_does_not_depend_on_later_bytes():
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=16, width=32, layers=2, heads=2, tied=False)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 256
    differs = (model(tokens) != model(changed)).any(dim=-1)
    assert differs.tolist() == [[False] * 9 + [True] * 7] * 2


def test_rotary_positions_depend_on_the_distance_alone_and_keep_length_and_dtype():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 32, dtype=torch.float64)
    cos, sin = rotary_table(64, 32)
    assert sin[1, 8].item() == pytest.approx(math.sin(10_000**-0.5), rel=1e-6)
    scores = rotate(query.expand(64, 32), cos, sin) @ rotate(key.expand(64, 32), cos, sin).T
    # The table is float32: an angle of 63 rad is off by up to 4e-6, times 32 products of size 1.
    for distance in range(-63, 64):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-4)
    assert scores[0].unique().numel() == 64
    x = torch.randn(64, 32)
    # torch's tolerance for float32
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_gpt_124m_has_the_parameters_that_its_file_names_with_tied_weights_counted_once():
    task = build_task(load("--config", GPT_124M))
    with torch.device("meta"):
        model = task.build_model()
    assert model.head.weight is model.embedding.weight
    parameters = sum(p.numel() for p in model.parameters())
    assert 120e6 <= parameters <= 128e6
    assert f"{parameters:,} parameters" in GPT_124M.read_text()
    products = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # of a token
    products += task.layers * 2 * task.context * task.width  # scores and weighted sums of values
    assert task.flops_per_item(model) == 3 * 2 * task.context * products


def test_a_sample_continues_the_prompt_the_same_every_time_and_evaluation_has_bits_per_byte():
    small = ["--task.args.context", 16, "--task.args.width", 16, "--task.args.heads", 2]
    task = build_task(load(*small, "--task.args.sample_bytes", 8, "--task.args.prompt=from the "))
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        first, second = task.sample(model), task.sample(model)
    assert first == second
    assert first.startswith("from the ")
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = task.collate([{"input_ids": row, "labels": row} for row in tokens])
    sums = task.metrics(model, batch)
    assert (task.weight(batch), task.tokens(batch)) == (32, 32)
    assert sums["bits_per_byte"].item() == pytest.approx(sums["loss"].item() / math.log(2))
    # an untrained model is close to uniform
    assert sums["bits_per_byte"].item() / 32 == pytest.approx(8, abs=0.5)


def tag(model):
    model[0][0].weight.no_decay = True


def attribute_of(world):
    """An attribute of a parameter of a model that rank 0 has drawn, after it has been placed."""
    module = build_on_ranks(Changed(tag), world, False)
    placement(module, world)(module)
    return module[0][0].weight.no_decay


def test_parameters_keep_their_attributes_on_ranks_that_have_not_drawn_them():
    assert on_ranks(2, attribute_of) == [True, True]
