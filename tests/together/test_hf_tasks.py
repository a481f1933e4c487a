"""Fine-tuning tasks for Hugging Face models: what is learned, padding, LoRA, and bad inputs."""

import json
import logging
import math
import sys

import pytest
import torch
from conftest import ROOT
from messages import message_of
from ranks import on_ranks
from tiny import make_run, parameters_of, save, take_steps

pytest.importorskip("transformers")
import datasets
from PIL import Image
from tiny_hf import QUICK, TEMPLATE, chats, make_model, make_tokenizer, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    ResNetConfig,
    ViTImageProcessorPil,
)

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task, find_task
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import IGNORE_INDEX, encode
from dist_amp.sources.load import class_names, load_split
from dist_amp.sources.tokenizer import of_transformers
from dist_amp.step import evaluate
from dist_amp.tasks.hf_causal_lm import HFCausalLM
from dist_amp.tasks.hf_classification import HFClassification
from dist_amp.verify.findings import inspect_task
from dist_amp.verify.reference import Reference
from dist_amp.world import World

CPU = torch.device("cpu")
MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "two"},
]


def learned(row, tokenizer):
    """(the whole text, the parts that are learned, joined by |)."""
    ids, labels = encode(row, of_transformers(tokenizer), "text")
    assert len(ids) == len(labels)
    assert {label for token, label in zip(ids, labels, strict=True) if label != token} <= {-100}
    text = "".join("|" if label == IGNORE_INDEX else tokenizer.decode([label]) for label in labels)
    return tokenizer.decode(ids), "|".join(part for part in text.split("|") if part)


PROMPTED = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
WHOLE = "<user>hi</s><assistant>one</s><user>more</s><assistant>two</s>"


@pytest.mark.parametrize(
    ("row", "text", "parts"),
    [
        ({"messages": MESSAGES}, WHOLE, "one</s>|two</s>"),
        (PROMPTED, WHOLE, "two</s>"),
        ({"prompt": "2 + 2 = ", "completion": "4"}, "2 + 2 = 4</s>", "4</s>"),
        ({"text": "a b"}, "a b</s>", "a b</s>"),
    ],
)
def test_answers_completions_and_plain_texts_are_learned(row, text, parts, tmp_path):
    assert learned(row, make_tokenizer(tmp_path)) == (text, parts)


def causal(folder, rows, **options):
    """The task on these rows, with its model and tokenizer in the same folder."""
    data = DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)
    return HFCausalLM(data, str(folder), **options)


@pytest.fixture
def folder(tmp_path):
    make_model(tmp_path, "llama_tied")
    make_tokenizer(tmp_path)
    return tmp_path


def test_the_loss_is_that_of_transformers_and_padding_changes_no_samples(folder):
    task = causal(folder, chats())
    samples = [task.build_dataset("train")[number] for number in range(4)]
    model, batch = build_whole(task, CPU).eval(), task.collate(samples)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert len(set(lengths)) > 1
    assert batch["attention_mask"].sum(1).tolist() == lengths
    together = task.loss_sum(model, batch)
    alone = [task.loss_sum(model, task.collate([sample])) for sample in samples]
    # The same sums in another order: float32 rounding of 4 samples of some 10 tokens with a loss of
    # 5 each.
    torch.testing.assert_close(together, torch.stack(alone).sum(), rtol=1e-5, atol=0)
    weights = [int((sample["labels"][1:] != IGNORE_INDEX).sum()) for sample in samples]
    assert task.weight(batch) == sum(weights)
    assert task.tokens(batch) == sum(lengths)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(**tensors).loss
    torch.testing.assert_close(together / task.weight(batch), theirs)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_mixtures_auxiliary_loss_is_added_as_transformers_does_and_weighted(name, tmp_path):
    make_tokenizer(make_model(tmp_path, name))
    task = causal(tmp_path, chats())
    model = build_whole(task, CPU)
    assert model.training
    batch = task.collate([task.build_dataset("train")[number] for number in range(4)])
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    theirs = model(**tensors, output_router_logits=True)
    assert theirs.aux_loss > 0
    torch.testing.assert_close(task.loss_sum(model, batch) / task.weight(batch), theirs.loss)
    without = model(**tensors)
    evaluated = task.loss_sum(model.eval(), batch) / task.weight(batch)
    torch.testing.assert_close(evaluated, without.loss)


@pytest.mark.parametrize("coefficient", [0.5, 0.0])
def test_verify_fails_a_mixtures_auxiliary_loss_and_says_how_to_verify_without_it(
    coefficient, tmp_path
):
    make_tokenizer(make_model(tmp_path, "mixtral"))
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"router_aux_loss_coef": coefficient}
    path.write_text(json.dumps(values))
    task = causal(tmp_path, chats(400))
    reference = Reference(load_config([*QUICK, "--run.device", "cpu"], {}), CPU, task)
    findings = [finding for finding in inspect_task(reference) if finding.fails]
    assert bool(findings) == bool(coefficient)
    if findings:
        assert "verify with a coefficient of 0, for Hugging Face router_aux_l" in findings[0].text


def mixture_step(world, folder, strategy, checkpointing):
    words = ["--train.global_batch_size", 4, "--train.micro_batch_size", 4 // world.world_size]
    words += ["--parallel.strategy", strategy, "--optim.lr", 0.05, "--optim.name", "sgd"]
    words += ["--parallel.activation_checkpointing", checkpointing]
    run = make_run(world, causal(folder, chats()), *QUICK, *words)
    (report,) = take_steps(run, 1)
    return world.sum(report.loss_sum) / report.weight, report.norm, parameters_of(run)


def test_a_mixtures_auxiliary_loss_is_trained_alike_when_sharded_and_recomputed(tmp_path):
    make_tokenizer(make_model(tmp_path, "mixtral"))
    expected = on_ranks(2, mixture_step, tmp_path, "ddp", "none")
    sharded = on_ranks(2, mixture_step, tmp_path, "fsdp", "full")
    # Sums in another order, of float32.
    torch.testing.assert_close(sharded, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.bad_input("rows of which nothing can be learned within `task.args.length`")
def test_long_samples_are_cut_and_those_without_anything_to_learn_are_left_out(folder):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "abcdefgh", "completion": "i"}] * 4
    samples = causal(folder, rows, length=4).build_dataset("train")
    completion = make_tokenizer(folder)("cd")["input_ids"]
    for sample in samples:
        assert sample["labels"].tolist() == [IGNORE_INDEX] * 2 + completion
    text = message_of(65, causal(folder, rows[1::2], length=2).build_dataset, "train")
    assert "train documents has anything to learn within 2 tokens" in text


LORA = {"lora_rank": 2, "sample_tokens": 5}


def continued(world, folder, strategy, options, steps):
    """Two steps of SGD, saved: (parameters before, and after, the evaluation, a sample)."""
    task = causal(folder, chats(), pad_to_multiple_of=1, **options)
    words = f"--train.global_batch_size 4 --train.micro_batch_size {4 // world.world_size} "
    words += f"--parallel.strategy {strategy} --run.dir {folder / 'run'} --run.resume auto "
    words += "--train.steps 4 --optim.lr 0.05 --optim.name sgd"
    run = make_run(world, task, *QUICK, *words.split())
    assert run.step == steps - 2
    before = parameters_of(run)
    take_steps(run, 2)
    save(run)
    with run.parallel.evaluating():
        text = task.sample(run.parallel.module)
    return before, parameters_of(run), evaluate(run), text


def moved(before, after):
    return {name for name in after if not torch.equal(after[name], before[name])}


@pytest.mark.parametrize(("options", "strategy"), [({}, "ddp"), (LORA, "fsdp")])
def test_fine_tuning_on_two_ranks_is_that_on_one(options, strategy, tmp_path):
    """FSDP2 shards adapters and frozen weights alike, and a sample is made by the sharded model."""
    for name in ("one", "two"):
        make_tokenizer(make_model(tmp_path / name, "llama_tied"))
    (alone,) = on_ranks(1, continued, tmp_path / "one", "single", options, 2)
    before, after, values, text = alone
    assert values.keys() == {"loss", "accuracy"}
    assert text.startswith("Hello")
    assert moved(before, after) == {name for name in after if "lora_" in name or not options}
    for rank in on_ranks(2, continued, tmp_path / "two", strategy, options, 2):
        torch.testing.assert_close(rank[0], before, rtol=0, atol=0)
        # Two steps of 0.05 times gradients of at most some units, which are sums in another
        # order: 2^-24 of each.
        torch.testing.assert_close(rank[1], after, rtol=0, atol=1e-6)
        assert rank[2] == pytest.approx(values, rel=1e-5)
        assert rank[3] == text


def test_adapters_resume_under_another_strategy(tmp_path):
    """The checkpoint has the adapters alone; the frozen weights come from the files again."""
    make_tokenizer(make_model(tmp_path, dtype=torch.bfloat16))
    _, (_, saved, *_) = on_ranks(2, continued, tmp_path, "fsdp", LORA, 2)
    ((before, after, *_),) = on_ranks(1, continued, tmp_path, "single", LORA, 4)
    torch.testing.assert_close(before, saved, rtol=0, atol=0)
    assert moved(before, after) == {name for name in after if "lora_" in name}


def test_frozen_weights_keep_the_dtype_of_the_files_and_adapters_are_float32(tmp_path):
    make_tokenizer(make_model(tmp_path, dtype=torch.bfloat16))
    model = build_whole(causal(tmp_path, chats(), lora_rank=2), CPU)
    found = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert found == {(True, torch.float32), (False, torch.bfloat16)}
    whole = build_whole(causal(tmp_path, chats()), CPU)
    assert {p.dtype for p in whole.parameters()} == {torch.float32}


# ---- classification ----

WORDS = [(0, "a"), (1, "b")]
TEXTS = [{"text": word * n, "label": label} for n in (1, 2, 3) * 4 for label, word in WORDS]
LONGER = "--train.steps 16 --train.micro_batch_size 8 --optim.lr 1e-2".split()


@pytest.mark.parametrize(("name", "rank"), [("bert_base", 0), ("llama", 2)])
def test_texts_are_classified_by_a_new_head_or_the_files_own(name, rank, tmp_path):
    """From a base model, and a causal model with adapters and a head that is trained whole."""
    make_tokenizer(make_model(tmp_path, name))
    data = DataConfig(path=str(write_rows(tmp_path / "rows.jsonl", TEXTS)))
    task = HFClassification(data, str(tmp_path), classes=2, lora_rank=rank)
    run = make_run(World(), task, *QUICK, *LONGER)
    take_steps(run, 16)
    values = evaluate(run)
    assert values["accuracy"] == 1
    assert values["loss"] < math.log(2) / 2  # half of what guessing costs


def test_images_are_classified(tmp_path):
    make_model(tmp_path, "vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    colors = [(100 * label + number,) * 3 for number in range(8) for label in range(3)]
    images = [Image.new("RGB", (16, 16), color) for color in colors]
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2] * 8})
    rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / "rows.parquet")
    data = DataConfig(path=str(tmp_path / "rows.parquet"), text_column="image")
    task = HFClassification(data, str(tmp_path), classes=3, of="image")
    run = make_run(World(), task, *QUICK, *LONGER)
    *_, last = take_steps(run, 16)
    assert last.losses[0] / last.weight < math.log(3) / 2  # half of what guessing costs


def classifier(folder, data="", classes=2):
    make_tokenizer(make_model(folder, "bert"))
    data = DataConfig(path=str(folder / data), validation_split="train")
    return HFClassification(data, str(folder), classes=classes)


def test_text_labels_are_numbered_as_those_of_images_are(tmp_path):
    labels = ["None", "good", "00042", "bad"] * 4
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"a,{one}\n" for one in labels))
    task = classifier(tmp_path, "rows.csv", classes=4)
    samples = list(task.build_dataset("train"))
    numbers = [["00042", "None", "bad", "good"].index(label) for label in labels]
    assert task.collate(samples)["labels"].tolist() == numbers
    assert task.names == class_names(load_split(task.data, "train"), "label")


@pytest.mark.bad_input("text labels of more classes than `task.args.classes`, or of none")
@pytest.mark.bad_input("a label that is not one of `task.args.classes`")
def test_labels_that_are_no_class_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na,x\nb,y\nc,z\n")
    (tmp_path / "numbers.csv").write_text("text,label\na,0\nb,1\n")
    text = message_of(65, classifier(tmp_path, "rows.csv").build_dataset, "train")
    assert "the column label names 3 classes, such as x, y, z, and task.args.classes=2; set" in text
    for file, label in (
        ("rows.csv", "w"),
        ("numbers.csv", 2),
        ("rows.csv", None),
        ("rows.csv", 1.5),
    ):
        task = classifier(tmp_path, file, classes=3 if file == "rows.csv" else 2)
        with pytest.raises(ValueError, match=f"label {label} is not one of task.args.classes="):
            task.collate([{"text": "c", "label": label}])


def test_a_classifier_is_not_asked_for_an_embedding_which_some_models_lack(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    task = HFClassification(DataConfig(), str(tmp_path), classes=3, of="image")
    assert task.units(task.build_model()) == []


# ---- samples ----

ASKED = "<user>Hello</s><assistant>"


@pytest.mark.parametrize(
    ("rows", "template", "seen"),
    [
        (chats(), TEMPLATE, ASKED),
        ([{"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]}] * 4, TEMPLATE, ASKED),
        (None, TEMPLATE, ASKED),
        ([{"text": "a"}] * 4, TEMPLATE, "Hello"),
        ([{"text": "a"}] * 4, None, "Hello"),
    ],
)
def test_a_sample_asks_as_the_rows_do(rows, template, seen, folder, monkeypatch):
    """Without the rows it is a chat, if the tokenizer knows them."""
    tokenizer = make_tokenizer(folder, template)
    task = causal(folder, rows or [], sample_tokens=3)
    if rows is None:
        (folder / "rows.jsonl").unlink()
    model = build_whole(task, CPU).eval()
    asked, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **ids: asked.append(ids) or generate(**ids))
    text = task.sample(model)
    assert tokenizer.decode(asked[0]["input_ids"][0]) == seen
    assert text.startswith("Hello\n" if seen == ASKED else "Hello")


def test_the_task_of_the_docs_page_runs(folder):
    page = (ROOT / "docs/huggingface.md").read_text().split("## Your own task")[1]
    code = page.split("```python\n")[1].split("```")[0]
    made = {}
    exec(code, made)
    write_rows(folder / "rows.jsonl", [{"text": "ab" * (1 + number % 3)} for number in range(12)])
    task = made["MyTask"](DataConfig(path=str(folder / "rows.jsonl")), str(folder))
    run = make_run(World(), task, *QUICK, "--train.steps", 8, "--optim.lr", 1e-2)
    first, *_, last = [report.losses[0] / report.weight for report in take_steps(run, 8)]
    assert last < first


# ---- bad inputs ----


@pytest.mark.bad_input("a tokenizer with more tokens than the model's embedding has rows")
def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    make_tokenizer(folder, extra=3)
    text = message_of(65, causal(folder, chats()).build_model)
    assert "has 263 tokens and the model's embedding 260 rows; use the model's own" in text


@pytest.mark.bad_input("a LoRA target that matches no layer; a rank below 0")
@pytest.mark.bad_input("`task.args.lora_targets` without `lora_rank`")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--task.args.lora_rank 2 --task.args.lora_targets q_proj,query",
            "task.args.lora_targets=q_proj,query: 'query' matches no layer of LlamaForCausalLM; "
            "its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj,",
        ),
        ("--task.args.lora_targets q_proj", "lora_targets=q_proj needs lora_rank above 0; set it"),
        ("--task.args.lora_rank -1", "must be at least 0"),
    ],
)
def test_settings_that_fit_no_adapter_are_refused(words, message, folder):
    target = ["--task.target", "dist_amp.tasks.hf_causal_lm:HFCausalLM"]
    words = [*target, "--task.args.model", str(folder), *words.split()]
    text = message_of(64, lambda: build_task(load_config(words, environ={})).build_model())
    assert message in text


@pytest.mark.bad_input(
    "a model name that is neither a folder nor on the hub, a folder without a tokenizer, or a "
    "model of another kind than the task's"
)
@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("llama_nope", 65, "the hub: it is not in the cache"),
        ("./absent", 65, "task.args.model=./absent is no folder in "),
        ("empty", 65, "AutoTokenizer can't be read from empty: "),
        ("t5", 64, "is a t5 model, for which there is no AutoModelForCausalLM"),
    ],
)
def test_a_model_that_is_no_folder_or_of_another_kind_is_refused(
    name, status, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    make_tokenizer(make_model(tmp_path / "t5", "t5"))
    text = message_of(status, lambda: HFCausalLM(DataConfig(), name).build_model())
    assert message in text


OTHER_KEYS = [{"speaker": "human", "said": "hi"}]


@pytest.mark.bad_input(
    "rows with other columns (prompt and response), other keys (`speaker` and `said`), or no list "
    "of messages"
)
@pytest.mark.bad_input("a chat that the template can't render, or no chat template")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": "b"}, "rows have the columns prompt, response; they need me"),
        ({"question": "a"}, "data.text_column=text does not exist, nor messages or prompt"),
        ({"messages": OTHER_KEYS}, "row 0: messages holds [{'speaker': 'human', 'said': 'hi'}]; m"),
        (
            {"prompt": MESSAGES[:1], "completion": OTHER_KEYS},
            "row 0: completion holds [{'speaker': ",
        ),
        ({"messages": "hi"}, "row 0: messages holds hi; make it a list of messages, each with rol"),
        ({"messages": ["hi"]}, "row 0: messages holds ['hi']; make it a list of messages"),
        (None, "rows are chats, but the tokenizer has no chat template; use a chat model's"),
    ],
)
def test_rows_of_another_form_are_described(row, message, folder):
    if row is None:
        (folder / "chat_template.jinja").unlink()
    rows = [row] * 4 if row else chats()
    text = message_of(65, causal(folder, rows).build_dataset, "train")
    assert text.startswith(message)


def warnings_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


@pytest.mark.bad_input("rows with nothing to learn beside others")
def test_rows_that_are_left_out_are_counted_once(folder, capsys, caplog):
    rows = [{"prompt": "ab", "completion": "cd"}] * 16
    rows += [{"prompt": "abcdefgh", "completion": "i"}] * 8
    causal(folder, rows, length=4).build_dataset("train")
    (line,) = warnings_of(capsys)
    number, rows_in_all = (int(word) for word in line.split()[1:4:2])
    text = f"warning: {number} of {rows_in_all} train documents are left out: within 4 tokens they"
    assert line.startswith(text)
    assert rows_in_all == 18
    assert 2 <= number <= 8  # of the 8, all but those held out
    with caplog.at_level(logging.ERROR, "dist_amp"):  # as on the other ranks
        causal(folder, rows, length=4).build_dataset("train")
    assert warnings_of(capsys) == []


@pytest.mark.bad_input("a tokenizer without `eos_token`")
def test_a_tokenizer_without_an_end_is_warned_about_once(folder, capsys):
    tokenizer = make_tokenizer(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    task = causal(folder, [{"text": "ab"}] * 8)
    for split in ("train", "validation"):
        task.build_dataset(split)
    (line,) = warnings_of(capsys)
    assert line.startswith("warning: the tokenizer has no eos_token, so no sample ends with one")


@pytest.mark.bad_input("a task whose package is not installed")
def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "dist_amp.tasks.hf_causal_lm")
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = message_of(64, find_task, "dist_amp.tasks.hf_causal_lm:HFCausalLM")
    assert "failed with ModuleNotFoundError: " in text
    assert "transformers" in text
    assert text.endswith("; pip install transformers")
