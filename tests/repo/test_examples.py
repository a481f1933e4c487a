"""Each file in examples/ is short, trains by the command that it names, and learns.

Of preference.py and image_text.py also the loss, ranks, resuming and exports.
"""

import ast
import math
import re
import shlex

import datasets
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from messages import message_of
from PIL import Image
from ranks import on_ranks
from tiny import make_run, parameters_of, save, take_steps
from tiny_hf import LLAMA, QUICK, chats, make_model, make_tokenizer, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaProcessor,
)

from benchmarks.amp import EXPERIMENTS
from dist_amp.checkpoint.compatibility import settings_of
from dist_amp.commands import export
from dist_amp.config.task_class import find_task
from dist_amp.record import Record
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import Config, DataConfig
from dist_amp.sources.conversations import IGNORE_INDEX
from dist_amp.step import evaluate
from dist_amp.train import main
from examples.image_text import ImageText
from examples.preference import DPO

MOVED = ("sinusoid:Sinusoid", "preference:DPO", "image_text:ImageText")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LESS_WORK = {
    "cnn": "--task.args.samples 320 --train.micro_batch_size 16",
    "image_text": "--data.path rows.jsonl --task.args.model . --optim.lr 0.02",
    "mlp": "--task.args.width 16 --task.args.samples 1024",
    "preference": "--data.path rows.jsonl --task.args.model . --optim.lr 0.01",
    "sinusoid": "--task.args.crop 4 --task.args.size 32 --task.args.width 32 --task.args.crops 256",
}
MEASURED = ("cnn", "linear", "mlp")  # by `python -m benchmarks amp`, as they stand
CPU = torch.device("cpu")
COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 200, 0)}
VISION = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32}
VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% for part in m['content'] %}{% if part['type'] == "
    "'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}{% if "
    "add_generation_prompt %}<assistant>{% endif %}"
)


def pairs():
    """Prompts of different lengths, of which the answer in small letters is preferred."""
    answers = [{"chosen": "ab" * (1 + number % 3), "rejected": "XY"} for number in range(24)]
    return [{"prompt": f"say {number}: ", **row} for number, row in enumerate(answers)]


def questions():
    """Rows that name the files of their images, relative to their own folder."""
    names = 8 * list(COLORS)
    return [
        {"image": f"{name}.png", "prompt": f"{number}? ", "completion": name}
        for number, name in enumerate(names)
    ]


def write_llama(folder):
    make_tokenizer(make_model(folder))
    return folder


def write_llava(folder):
    """Three images, a tiny Llava and its processor: an image of any size becomes four tokens."""
    for name, color in COLORS.items():
        Image.new("RGB", (20, 30), color).save(folder / f"{name}.png")
    tokenizer = make_tokenizer(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.chat_template = None
    config = LlavaConfig(
        vision_config=VISION,
        text_config={"model_type": "llama", **LLAMA, "vocab_size": len(tokenizer)},
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
    kind |= {"chat_template": TEMPLATE, "num_additional_image_tokens": 1}
    LlavaProcessor(images, tokenizer, **kind).save_pretrained(folder)
    return folder


# example: what makes its model, its rows, and the task
OF_HUGGING_FACE = {
    "preference": (write_llama, pairs, DPO),
    "image_text": (write_llava, questions, ImageText),
}


# ---- all ----


def arguments_of(path):
    """The words of the command in the docstring that follow `python -m dist_amp.train`."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    (command,) = re.findall(r"^python -m dist_amp\.train (.*?)\n\n", text + "\n\n", re.M | re.S)
    return shlex.split(command.replace("\\\n", " "))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_learns_by_its_own_command(path, tmp_path, monkeypatch):
    arguments = arguments_of(path)
    lines = len(path.read_text().splitlines())
    assert lines <= (60 if path.stem in MEASURED else 200)
    if path.stem in MEASURED:
        assert sorted(arguments) == sorted(EXPERIMENTS[path.stem].arguments.split())
    if path.stem in OF_HUGGING_FACE:
        write_model, rows, _ = OF_HUGGING_FACE[path.stem]
        write_model(tmp_path)
        write_rows(tmp_path / "rows.jsonl", rows())
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / word) if ".py:" in word else word for word in arguments]
    words += [*LESS_WORK.get(path.stem, "").split(), "--use_amp", "false", "--run.dir", "run"]
    words += ["--train.steps", "20", "--run.device", "cpu", "--metrics.log_every", "2"]
    assert main(words) == 0
    rows = Record(tmp_path / "run").rows
    losses = [row["train/loss"] for row in rows if "train/loss" in row]  # not of the evaluation
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", MOVED)
def test_the_old_name_of_a_task_that_moved_to_the_examples_finds_it(name, tmp_path, monkeypatch):
    old = f"dist_amp.tasks.{name}"
    new = f"examples/{name.replace(':', '.py:')}"
    monkeypatch.chdir(ROOT)
    assert find_task(old) is find_task(new)
    (tmp_path / "config.toml").write_text(f'[task]\ntarget = "{old}"\n')
    assert settings_of(tmp_path, Config())["task.target"] == new
    monkeypatch.chdir(tmp_path)
    assert "there is no file examples/" in message_of(64, find_task, old)


# ---- those of Hugging Face's models ----
def task_of(example, folder, rows=None, **options):
    _, usual_rows, task = OF_HUGGING_FACE[example]
    path = write_rows(folder / "rows.jsonl", rows or usual_rows())
    return task(DataConfig(path=str(path), validation_split=0.25), str(folder), **options)


def trained_and_resumed(world, example, folder, strategy, options):
    """Four steps of SGD, saved after two and resumed there: the parameters and the evaluation."""
    task = task_of(example, folder, pad_to_multiple_of=1, **options)
    words = f"--train.global_batch_size 4 --train.micro_batch_size {4 // world.world_size} "
    words += f"--parallel.strategy {strategy} --run.dir {folder / strategy} --train.steps 4 "
    words += "--optim.name sgd --optim.lr 0.1"
    run = make_run(world, task, *QUICK, *words.split())
    take_steps(run, 2)
    save(run)
    take_steps(run, 2)
    resumed = make_run(world, task, *QUICK, *words.split(), "--run.resume", "auto")
    assert resumed.step == 2
    take_steps(resumed, 2)
    torch.testing.assert_close(parameters_of(resumed), parameters_of(run), rtol=0, atol=0)
    return parameters_of(run), evaluate(run)


@pytest.mark.parametrize(
    ("example", "options", "strategy"),
    [("preference", {"beta": 0.5}, "ddp"), ("image_text", {"lora_rank": 2}, "fsdp")],
)
def test_two_ranks_learn_what_one_does_and_resume_bit_for_bit(example, options, strategy, tmp_path):
    OF_HUGGING_FACE[example][0](tmp_path)
    words = (example, tmp_path)
    ((alone, values),) = on_ranks(1, trained_and_resumed, *words, "single", options)
    if example == "preference":
        assert values["loss"] < 0.9 * math.log(2)
        assert values["margin"] > 0
        assert values["accuracy"] == 1
    for parameters, evaluation in on_ranks(2, trained_and_resumed, *words, strategy, options):
        # Four steps of 0.1 times gradients of some units, in another order: 2^-24 of each.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=2e-6)
        assert evaluation == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("example", "name", "rank", "kind"),
    [
        ("preference", "DPO", 0, AutoModelForCausalLM),
        ("image_text", "ImageText", 2, AutoModelForImageTextToText),
    ],
)
def test_an_export_opens_in_transformers_without_what_only_training_needs(
    example, name, rank, kind, tmp_path, monkeypatch
):
    write, rows, _ = OF_HUGGING_FACE[example]
    write(tmp_path)
    write_rows(tmp_path / "rows.jsonl", rows())
    monkeypatch.chdir(tmp_path)
    target = f"--task.target {ROOT}/examples/{example}.py:{name}"
    words = f"{target} --task.args.model . --task.args.lora_rank {rank} --data.path rows.jsonl "
    words += "--train.steps 4 --optim.lr 0.01 --run.dir run"
    run = make_run(None, None, *QUICK, *words.split())
    take_steps(run, 2)
    save(run)
    batch = run.data.last_step[0][0]
    names = [name for name in ("input_ids", "attention_mask", "pixel_values") if name in batch]
    inputs = {name: batch[name] for name in names}
    model = run.parallel.module.eval()
    with torch.no_grad():
        expected = getattr(model, "policy", model)(**inputs).logits
    merge = "--merge" if rank else ""
    assert export.main(f"run --out out --format hf {merge} {target}".split()) == 0
    if example == "image_text":
        assert AutoProcessor.from_pretrained("out").chat_template == TEMPLATE
    with torch.no_grad():
        logits = kind.from_pretrained("out")(**inputs).logits
    # W x + B A x and (W + B A) x round differently: some 2^-24 of values of about 1.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


# ---- preferences ----


def moved_off(model):
    """The model after the policy was trained a little, so that it is not its reference."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def plain_loss(policy, reference, tokenizer, rows, beta):
    """The sum over pairs of the paper's equation 7, a row at a time, without padding."""

    def log_probability(model, prompt, answer):
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id]])
        logs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return logs.gather(1, ids[0, 1:, None])[start - 1 :].sum()

    total = 0.0
    for row in rows:
        rewards = []
        for answer in (row["chosen"], row["rejected"]):
            with torch.no_grad():
                base = log_probability(reference, row["prompt"], answer)
            rewards.append(beta * (log_probability(policy, row["prompt"], answer) - base))
        total = total - F.logsigmoid(rewards[0] - rewards[1])
    return total


@pytest.mark.parametrize("rank", [0, 2])
def test_the_loss_of_pairs_and_its_gradient_are_those_of_a_plain_reference(rank, tmp_path):
    llama = write_llama(tmp_path)
    task = task_of("preference", llama, beta=0.3, lora_rank=rank)
    model = moved_off(build_whole(task, CPU))
    dataset = task.build_dataset("train")
    dataset.rows = rows = pairs()[:4]
    batch = task.collate([dataset[number] for number in range(4)])
    trained = [p for p in model.parameters() if p.requires_grad]
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    plain = plain_loss(model.policy, base, task.tokenizer, rows, 0.3)
    expected = torch.autograd.grad(plain, trained)
    loss = task.loss_sum(model, batch)
    gradients = torch.autograd.grad(loss, trained)
    # Sums of some tens of terms of at most 10 in another order: 2^-24 of each.
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
    assert task.weight(batch) == 4
    alone = [task.loss_sum(model, task.collate([dataset[number]])) for number in range(4)]
    torch.testing.assert_close(torch.stack(alone).sum(), loss, rtol=1e-5, atol=1e-5)


# ---- images and texts ----


@pytest.mark.parametrize(
    ("row", "text", "answers"),
    [
        ({"prompt": "a <image>? ", "completion": "red"}, "a IMAGE? red</s>", "red</s>"),
        (
            {"messages": chats(1)[0]["messages"] + chats(2)[1]["messages"]},
            "<user>IMAGEsay 0</s><assistant>ab</s><user>say 1</s><assistant>abab</s>",
            "ab</s>abab</s>",
        ),
    ],
)
def test_answers_are_learned_and_the_image_is_where_the_text_says_or_first(
    row, text, answers, tmp_path
):
    llava = write_llava(tmp_path)
    row = {"image": "red.png", **row}
    task = task_of("image_text", llava, [row] * 4, pad_to_multiple_of=1)
    dataset = task.build_dataset("train")
    batch = task.collate([dataset[0]])
    decode = task.processor.tokenizer.decode
    learned = batch["labels"][0]
    assert decode(batch["input_ids"][0]) == text.replace("IMAGE", "<image>" * 4)
    assert decode(learned[learned != IGNORE_INDEX]) == answers
    # The same from a table that holds the image.
    images = datasets.Dataset.from_dict({"image": [str(llava / "red.png")]})
    row["image"] = images.cast_column("image", datasets.Image())[0]["image"]
    dataset.rows = [row]
    assert dataset[0][0].getpixel((0, 0)) == COLORS["red"]


@pytest.mark.parametrize(("chunk", "length"), [("auto", 2048), (5, 50)])
def test_the_loss_is_that_of_transformers_and_padding_changes_no_samples(chunk, length, tmp_path):
    llava = write_llava(tmp_path)
    task = task_of("image_text", llava, loss_chunk=chunk, length=length)
    dataset = task.build_dataset("train")
    samples = [dataset[number] for number in range(4)]
    model = build_whole(task, CPU).eval()
    batch = task.collate(samples)
    for name in ("input_ids", "attention_mask", "labels"):
        assert batch[name].shape == (4, min(128, length))
    assert batch["tokens"] == batch["attention_mask"].sum() < 120  # padding does not count
    assert batch["counted"] == (batch["labels"] != IGNORE_INDEX).sum()
    loss = task.loss_sum(model, batch)
    alone = [task.loss_sum(model, task.collate([sample])) for sample in samples]
    # The same sums in another order: float32 rounding of 4 samples of some 5 tokens.
    torch.testing.assert_close(torch.stack(alone).sum(), loss, rtol=1e-5, atol=0)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    theirs = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)(**tensors)
    torch.testing.assert_close(loss / task.weight(batch), theirs.loss)
