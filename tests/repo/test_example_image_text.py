"""examples/image_text.py: what is learned, two ranks, resuming, exporting, and wrong inputs."""

import math

import pytest
import torch
from conftest import ROOT
from messages import message_of
from ranks import on_ranks
from tiny import make_run, save, take_steps

pytest.importorskip("transformers")
import datasets
from PIL import Image
from tiny_hf import (
    LLAMA,
    QUICK,
    make_model,
    make_tokenizer,
    trained_and_resumed,
    write_rows,
)
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaProcessor,
)

from dist_amp.commands import export
from dist_amp.errors import DataError
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import IGNORE_INDEX
from dist_amp.step import evaluate
from dist_amp.tasks.loss_head import LossHead
from dist_amp.verify import __main__ as verify
from dist_amp.verify.cells import capture
from examples.image_text import ImageText

CPU = torch.device("cpu")
TARGET = f"{ROOT}/examples/image_text.py:ImageText"
EXPORT = "run --out out --format hf --merge".split()
COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 200, 0)}
VISION = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32}
VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{% if part['type'] == "
    "'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)


def make_llava(folder, template=TEMPLATE):
    """A tiny Llava and its processor: an image of any size becomes four tokens."""
    tokenizer = make_tokenizer(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template = None
    text = {"model_type": "llama", **LLAMA, "vocab_size": len(tokenizer)}
    config = LlavaConfig(
        vision_config=VISION,
        text_config=text,
        image_token_id=len(tokenizer) - 1,
        vision_feature_layer=-1,
        image_seq_length=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    kind = {"patch_size": 8, "vision_feature_select_strategy": "default"}
    LlavaProcessor(
        images, tokenizer, chat_template=template, num_additional_image_tokens=1, **kind
    ).save_pretrained(folder)
    return folder


def write_model_and_images(folder):
    for name, color in COLORS.items():
        Image.new("RGB", (20, 30), color).save(folder / f"{name}.png")
    return make_llava(folder)


@pytest.fixture
def folder(tmp_path):
    return write_model_and_images(tmp_path)


def questions(count=24):
    """Rows that name the files of their images, relative to their own folder."""
    rows = []
    for number in range(count):
        name = list(COLORS)[number % 3]
        row = {"image": f"{name}.png", "prompt": f"{number}? ", "completion": name}
        rows.append(row)
    return rows


def chat(name="red"):
    return [
        {"role": "user", "content": "which?"},
        {"role": "assistant", "content": name},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]


def task_of(folder, rows, **options):
    data = DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)
    return ImageText(data, str(folder), **options)


def learned(task, row):
    """(the whole text, the parts that are learned, joined by |)."""
    dataset = task.build_dataset("train")
    dataset.rows = [row]
    batch = task.collate([dataset[0]])
    tokens = task.processor.tokenizer
    parts = "".join(
        "|" if label == IGNORE_INDEX else tokens.decode([label]) for label in batch["labels"][0]
    )
    text = tokens.decode(batch["input_ids"][0])
    return text, "|".join(part for part in parts.split("|") if part)


FOUR = "<image>" * 4
PARTS = [{"type": "text", "text": "which?"}, {"type": "image", "text": None}]


@pytest.mark.parametrize(
    ("row", "text", "parts"),
    [
        ({"prompt": "a? ", "completion": "red"}, f"{FOUR}a? red</s>", "red</s>"),
        ({"prompt": "a <image>? ", "completion": "red"}, f"a {FOUR}? red</s>", "red</s>"),
        (
            {"messages": chat()},
            f"<user>{FOUR}which?</s><assistant>red</s><user>sure?</s><assistant>yes</s>",
            "red</s>|yes</s>",
        ),
        (
            {"messages": [{"role": "user", "content": PARTS}, chat()[1]]},
            f"<user>which?{FOUR}</s><assistant>red</s>",
            "red</s>",
        ),
    ],
)
def test_answers_are_learned_and_the_image_is_where_the_text_says_or_first(
    row, text, parts, folder
):
    task = task_of(folder, [{"image": "red.png", **row}] * 4, pad_to_multiple_of=1)
    assert learned(task, {"image": "red.png", **row}) == (text, parts)


@pytest.mark.parametrize("length", [2048, 50])
def test_rows_are_padded_to_a_multiple_of_tokens_but_not_beyond_the_length(length, folder):
    task = task_of(folder, questions(), length=length)
    dataset = task.build_dataset("train")
    batch = task.collate([dataset[0], dataset[1]])
    for name in ("input_ids", "attention_mask", "labels"):
        assert batch[name].shape == (2, min(128, length))
    assert batch["tokens"] == batch["attention_mask"].sum() < 60  # padding does not count
    assert batch["counted"] == (batch["labels"] != IGNORE_INDEX).sum()


@pytest.mark.parametrize("chunk", ["auto", 5, "off"])
def test_the_loss_is_that_of_transformers_and_padding_changes_no_samples(chunk, folder):
    task = task_of(folder, questions(), loss_chunk=chunk)
    dataset = task.build_dataset("train")
    samples = [dataset[number] for number in range(4)]
    model = build_whole(task, CPU).eval()
    batch = task.collate(samples)
    loss = task.loss_sum(model, batch)
    alone = [task.loss_sum(model, task.collate([sample])) for sample in samples]
    # The same sums in another order: float32 rounding of 4 samples of some 5 tokens.
    torch.testing.assert_close(torch.stack(alone).sum(), loss, rtol=1e-5, atol=0)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)(**tensors)
    torch.testing.assert_close(loss / task.weight(batch), theirs.loss)


def trained(world, folder, strategy, options):
    task = task_of(folder, questions(), pad_to_multiple_of=1, **options)
    return trained_and_resumed(world, task, folder, strategy, 0.05)


@pytest.mark.parametrize(("options", "strategy"), [({}, "ddp"), ({"lora_rank": 2}, "fsdp")])
def test_two_ranks_learn_what_one_does_and_resume_bit_for_bit(options, strategy, folder):
    ((alone, values),) = on_ranks(1, trained, folder, "single", options)
    assert values.keys() == {"loss", "accuracy"}
    for parameters, evaluation in on_ranks(2, trained, folder, strategy, options):
        # Four steps of 0.05 times gradients of some units, in another order: 2^-24 of each.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=2e-6)
        assert evaluation == pytest.approx(values, rel=1e-5)


def test_it_learns_to_name_what_only_the_image_shows(folder):
    rows = [{**row, "prompt": "? "} for row in questions()]
    words = "--train.steps 60 --train.micro_batch_size 8 --optim.lr 1e-2".split()
    run = make_run(None, task_of(folder, rows, pad_to_multiple_of=1), *QUICK, *words)
    take_steps(run, 60)
    # Without the image, the first letter of a word of three would cost log 3.
    assert evaluate(run)["loss"] < math.log(3) / 10


def test_images_that_a_table_holds_are_read_from_it(folder):
    images = datasets.Dataset.from_dict(
        {"image": [str(folder / "red.png")], "prompt": [""], "completion": ["red"]}
    )
    task = task_of(folder, questions())
    dataset = task.build_dataset("train")
    dataset.rows = images.cast_column("image", datasets.Image())
    image, text, _ = dataset[0]
    assert (image.getpixel((0, 0)), text) == (COLORS["red"], "<image>red</s>")


def gradients(world, folder, chunk, options, strategy):
    """Of a step; and the evaluation."""
    task = task_of(folder, questions(), loss_chunk=chunk, **options)
    run = make_run(world, task, *QUICK, "--parallel.strategy", strategy, "--eval.batches", 1)
    head = run.parallel.module.get_output_embeddings()
    assert isinstance(head, LossHead) == (chunk != "off")
    states = capture(run)
    take_steps(run, 1)
    return [state.gradients for state in states], evaluate(run)  # on rank 0 alone


@pytest.mark.parametrize(("options", "strategy"), [({}, "fsdp"), ({"lora_rank": 2}, "ddp")])
def test_the_loss_in_chunks_has_the_gradients_of_all_logits_at_once(options, strategy, folder):
    plain, chunked = (
        on_ranks(2, gradients, folder, chunk, options, strategy)[0] for chunk in ("off", 37)
    )
    largest = max(gradient.abs().max() for gradient in plain[0][-1].values())
    for key, true in plain[0][-1].items():
        # Sums in another order: some tens of roundings of 2^-24 of the largest. By a key's bias it
        # is 0 but for roundings of others.
        size = max(true.abs().max(), 1e-3 * largest)
        torch.testing.assert_close(chunked[0][-1][key], true, rtol=0, atol=4e-6 * size)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-4)


def test_an_export_opens_in_transformers_with_its_processor(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_rows(folder / "rows.jsonl", questions())
    words = ["--task.target", TARGET, "--task.args.model", folder, "--run.dir", "run"]
    words += ["--data.path", folder / "rows.jsonl", "--task.args.lora_rank", 2]
    run = make_run(None, None, *QUICK, *words, "--train.steps", 4, "--optim.lr", 0.01)
    take_steps(run, 2)
    save(run)
    batch = run.data.last_step[0][0]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    with torch.no_grad():
        expected = run.parallel.module.eval()(**inputs).logits
    assert export.main([*EXPORT, "--task.target", TARGET]) == 0
    with torch.no_grad():
        logits = AutoModelForImageTextToText.from_pretrained("out")(**inputs).logits
    # W x + B A x and (W + B A) x round differently: some 2^-24 of values of about 1.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert AutoProcessor.from_pretrained("out").chat_template == TEMPLATE


@pytest.mark.slow
def test_verify_passes_on_one_and_two_ranks(folder, capfd):
    write_rows(folder / "rows.jsonl", questions(300))
    words = f"--task.target {TARGET} --task.args.model {folder} --data.path {folder}/rows.jsonl"
    status = verify.main([*words.split(), "--world_sizes", "1,2", "--precisions", "fp32"])
    assert status == 0, capfd.readouterr().out


# ---- bad inputs ----


@pytest.mark.bad_input("an image and text: a path of no file, a file that is no image, no image")
@pytest.mark.bad_input("an image and text: an image or a prompt longer than `task.args.length`")
@pytest.mark.bad_input("an image and text: an empty answer, a chat without a user's turn")
@pytest.mark.bad_input("an image and text: two places for one image")
@pytest.mark.parametrize(
    ("row", "length", "message"),
    [
        ({"image": "no.png"}, 99, "no.png can't be read: .*No such file"),
        ({"image": "model.safetensors"}, 99, "can't be decoded"),
        ({"image": None}, 99, "the image  is NoneType; store encoded pictures"),
        ({}, 3, "the image takes 4 tokens, more than task.args.length=3 leaves it; use a gr"),
        ({"prompt": "abcdef"}, 8, "within task.args.length=8 of its 14 tokens the sample has no"),
        ({"completion": ""}, 99, "the completion not empty"),
        ({"completion": None}, 99, "prompt and completion must be texts"),
        ({"messages": [chat()[1]]}, 99, "the chat has no user's turn for the image; add one"),
        ({"messages": chat()[:1]}, 99, "the sample has no answer to learn"),
        ({"prompt": "<image><image>"}, 99, "number of <image> tokens in the prompts should be"),
    ],
)
def test_a_sample_of_which_nothing_can_be_learned_is_refused(row, length, message, folder):
    dataset = task_of(folder, questions(), length=length).build_dataset("train")
    dataset.rows = [{"image": "red.png", "prompt": "a", "completion": "red", **row}]
    with pytest.raises((DataError, ValueError), match=message):
        dataset[0]


@pytest.mark.bad_input("an image and text: no column of that name")
@pytest.mark.bad_input("an image and text: neither messages, nor prompt and completion")
@pytest.mark.bad_input("chats about images with a processor without a chat template")
@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"prompt": "a", "completion": "b"},
            {"image_column": "photo"},
            "no column photo; the columns",
        ),
        ({"completion": "a"}, {}, "no column prompt; the columns are image, completion"),
        ({"messages": chat()}, {}, "the processor has no chat template; use prompt"),
    ],
)
def test_rows_of_another_form_are_refused_with_what_they_need(row, options, message, folder):
    make_llava(folder, template=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    task = task_of(folder, [{"image": "red.png", **row}] * 4, **options)
    assert message in message_of(65, task.build_dataset, "train")


@pytest.mark.bad_input("a model of text alone for images and text")
def test_a_model_of_text_alone_is_refused(tmp_path):
    make_tokenizer(make_model(tmp_path, "llama"))
    text = message_of(64, task_of, tmp_path, questions())
    assert "has no processor with an image_token; use a model of i" in text
