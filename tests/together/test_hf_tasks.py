"""Fine-tuning tasks for Hugging Face models: what is learned, padding, LoRA, and bad inputs."""

import json
import logging
import math
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from ranks import on_ranks
from tiny import make_run, parameters_of, take_steps

pytest.importorskip("transformers")
import datasets
from PIL import Image
from tiny import save
from tiny_hf import CHAT, MARKED_TEMPLATE, TEMPLATE, chats, make_model, make_tokenizer, write_rows
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    ResNetConfig,
    ViTImageProcessorPil,
)

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task, find_task
from dist_amp.errors import ConfigError, DataError
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig, TaskConfig
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
QUICK = ("--train.micro_batch_size 2 --use_amp false --optim.warmup_steps 0 --eval.every 1").split()


def learned(row, tokenizer):
    """(the whole text, the parts that are learned, joined by |)."""
    ids, labels = encode(row, of_transformers(tokenizer), "text")
    assert len(ids) == len(labels)
    assert all(label in (token, IGNORE_INDEX) for token, label in zip(ids, labels, strict=True))
    text = "".join("|" if label == IGNORE_INDEX else tokenizer.decode([label]) for label in labels)
    return tokenizer.decode(ids), "|".join(part for part in text.split("|") if part)


# As templates do that drop the thoughts of earlier turns: the last turn alone is learned in full.
CHANGING = CHAT.replace("BEGIN", "{% if loop.last %}think {% endif %}").replace("END", "")
PROMPTED = {"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}
WHOLE = "<user>hi</s><assistant>one</s><user>more</s><assistant>two</s>"


@pytest.mark.parametrize(
    ("row", "template", "text", "parts"),
    [
        ({"messages": MESSAGES}, TEMPLATE, WHOLE, "one</s>|two</s>"),
        ({"messages": MESSAGES}, MARKED_TEMPLATE, WHOLE, "one</s>|two</s>"),
        (PROMPTED, TEMPLATE, WHOLE, "two</s>"),
        (PROMPTED, MARKED_TEMPLATE, WHOLE, "two</s>"),
        ({"prompt": "2 + 2 = ", "completion": "4"}, TEMPLATE, "2 + 2 = 4</s>", "4</s>"),
        ({"text": "a b"}, TEMPLATE, "a b</s>", "a b</s>"),
        ({"messages": MESSAGES}, CHANGING, WHOLE.replace("two", "think two"), "think two</s>"),
    ],
)
def test_answers_completions_and_plain_texts_are_learned(row, template, text, parts, tmp_path):
    assert learned(row, make_tokenizer(tmp_path, template)) == (text, parts)


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
    torch.testing.assert_close(
        task.loss_sum(model.eval(), batch) / task.weight(batch), without.loss
    )


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


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_mixtures_auxiliary_loss_is_trained_alike_when_sharded_and_recomputed(
    checkpointing, tmp_path
):
    make_tokenizer(make_model(tmp_path, "mixtral"))
    expected = on_ranks(2, mixture_step, tmp_path, "ddp", "none")
    for one, other in zip(
        expected, on_ranks(2, mixture_step, tmp_path, "fsdp", checkpointing), strict=True
    ):
        # Sums in another order, of float32.
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.bad_input("rows of which nothing can be learned within `task.args.length`")
def test_long_samples_are_cut_and_those_without_anything_to_learn_are_left_out(folder):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "abcdefgh", "completion": "i"}] * 4
    samples = causal(folder, rows, length=4).build_dataset("train")
    completion = make_tokenizer(folder)("cd")["input_ids"]
    for sample in samples:
        assert sample["labels"].tolist() == [IGNORE_INDEX] * 2 + completion
    said = r"none of the \d train documents has anything to learn within 2 tokens"
    with pytest.raises(DataError, match=said):
        causal(folder, rows[1::2], length=2).build_dataset("train")


def trained(world, folder, strategy, options):
    """Three steps of SGD: (parameters before, and after, the evaluation, a sample)."""
    task = causal(folder, chats(), **options)
    words = ["--train.global_batch_size", 4, "--train.micro_batch_size", 4 // world.world_size]
    words += ["--parallel.strategy", strategy, "--optim.lr", 0.05, "--optim.name", "sgd"]
    run = make_run(world, task, *QUICK, *words)
    before = parameters_of(run)
    take_steps(run, 3)
    with run.parallel.evaluating():
        text = task.sample(run.parallel.module)
    return before, parameters_of(run), evaluate(run), text


@pytest.mark.parametrize(("options", "strategy"), [({}, "ddp"), ({"lora_rank": 2}, "fsdp")])
def test_fine_tuning_on_two_ranks_is_that_on_one(options, strategy, folder):
    """FSDP2 shards adapters and frozen weights alike, and a sample is made by the sharded model."""
    ((before, after, values, text),) = on_ranks(1, trained, folder, "single", options)
    assert values.keys() == {"loss", "accuracy"}
    assert text.startswith("Hello")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if "lora_" in name or not options}
    for results in on_ranks(2, trained, folder, strategy, options):
        other_before, other_after, other_values, other_text = results
        assert all(torch.equal(other_before[name], before[name]) for name in before)
        # Three steps of 0.05 times gradients of at most some units, which are sums in another
        # order: 2^-24 of each.
        torch.testing.assert_close(other_after, after, rtol=0, atol=1e-6)
        assert other_values == pytest.approx(values, rel=1e-5)
        assert other_text == text


def continued(world, folder, strategy, steps):
    """Two steps with adapters on frozen bf16 weights, saved: parameters before and after."""
    task = causal(folder, chats(), lora_rank=2)
    words = f"--train.global_batch_size 4 --train.micro_batch_size {4 // world.world_size} "
    words += f"--parallel.strategy {strategy} --run.dir {folder / 'run'} --run.resume auto "
    run = make_run(world, task, *words.split(), "--train.steps", 4, "--optim.lr", 0.01)
    assert run.step == steps - 2
    before = parameters_of(run)
    take_steps(run, 2)
    save(run)
    return before, parameters_of(run)


def test_adapters_resume_under_another_strategy(tmp_path):
    """The checkpoint has the adapters alone; the frozen weights come from the files again."""
    make_tokenizer(make_model(tmp_path, dtype=torch.bfloat16))
    for before, after in on_ranks(2, continued, tmp_path, "fsdp", 2):
        saved = after
        assert any(not torch.equal(before[name], after[name]) for name in after)
    for before, after in on_ranks(1, continued, tmp_path, "single", 4):
        assert all(torch.equal(before[name], saved[name]) for name in saved)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved
        assert all("lora_" in name for name in moved)


def test_frozen_weights_keep_the_dtype_of_the_files_and_adapters_are_float32(tmp_path):
    make_tokenizer(make_model(tmp_path, dtype=torch.bfloat16))
    model = build_whole(causal(tmp_path, chats(), lora_rank=2), CPU)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    whole = build_whole(causal(tmp_path, chats()), CPU)
    assert {p.dtype for p in whole.parameters()} == {torch.float32}


WORDS = [(0, "a"), (1, "b")]
TEXTS = [{"text": word * n, "label": label} for n in (1, 2, 3) * 4 for label, word in WORDS]
LONGER = "--train.steps 16 --train.micro_batch_size 8 --optim.lr 1e-2".split()


@pytest.mark.parametrize(("name", "rank"), [("bert_base", 0), ("llama", 2)])
def test_texts_are_classified_by_a_new_head_or_the_files_own(name, rank, tmp_path):
    """From a base model, and a causal model with adapters and a head that is trained whole."""
    make_model(tmp_path, name)
    make_tokenizer(tmp_path)
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


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.parquet"])
def test_text_labels_are_numbered_as_those_of_images_are(tmp_path, name):
    make_model(tmp_path, "bert")
    make_tokenizer(tmp_path)
    labels = ["None", "good", "00042", "bad"] * 4
    rows = datasets.Dataset.from_dict({"text": ["a"] * 16, "label": labels})
    {"csv": rows.to_csv, "jsonl": rows.to_json, "parquet": rows.to_parquet}[name[5:]](
        tmp_path / name
    )
    data = DataConfig(path=str(tmp_path / name), validation_split="train")
    task = HFClassification(data, str(tmp_path), classes=4)
    samples = list(task.build_dataset("train"))
    numbers = [["00042", "None", "bad", "good"].index(label) for label in labels]
    assert task.collate(samples)["labels"].tolist() == numbers
    assert task.names == class_names(load_split(data, "train"), "label"), "as ImageClassification"


@pytest.mark.bad_input("text labels of more classes than `task.args.classes`, or of none")
def test_text_labels_that_are_no_class(tmp_path):
    make_model(tmp_path, "bert")
    make_tokenizer(tmp_path)
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,x\nb,y\nc,z\n")
    data = DataConfig(path=str(path), validation_split="train")
    task = HFClassification(data, str(tmp_path), classes=2)
    said = "the column label names 3 classes, such as x, y, z, and task.args.classes=2; set it to"
    with pytest.raises(DataError, match=said):
        task.build_dataset("train")
    task = HFClassification(data, str(tmp_path), classes=3)
    task.build_dataset("train")
    for label in ("w", None, 1.5, -1):
        with pytest.raises(ValueError, match=f"label {label} is not one of task.args.classes=3: "):
            task.collate([{"text": "c", "label": label}])


def test_a_classifier_is_not_asked_for_an_embedding_which_some_models_lack(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    task = HFClassification(DataConfig(), str(tmp_path), classes=3, of="image")
    assert task.units(task.build_model()) == []


@pytest.mark.bad_input("a label that is not one of `task.args.classes`")
def test_a_label_that_is_no_class(tmp_path):
    make_model(tmp_path, "bert")
    make_tokenizer(tmp_path)
    task = HFClassification(DataConfig(), str(tmp_path), classes=2)
    with pytest.raises(ValueError, match="label 2 is not one of task.args.classes=2: 0 to 1"):
        task.collate([{"text": "c", "label": 2}])


@pytest.mark.bad_input("a tokenizer with more tokens than the model's embedding has rows")
def test_a_tokenizer_larger_than_the_embedding(tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, extra=3)
    said = "has 263 tokens and the model's embedding 260 rows; use the model's own"
    with pytest.raises(DataError, match=said):
        causal(tmp_path, chats()).build_model()


@pytest.mark.bad_input("a LoRA target that matches no layer; a rank below 0")
def test_an_adapter_target_that_matches_nothing(folder):
    with pytest.raises(ConfigError) as caught:
        causal(folder, chats(), lora_rank=2, lora_targets="q_proj,query").build_model()
    assert str(caught.value) == (
        "task.args.lora_targets=q_proj,query: 'query' matches no layer of LlamaForCausalLM; its "
        "linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )


@pytest.mark.bad_input("`task.args.lora_targets` without `lora_rank`")
def test_settings_of_adapters_that_fit_no_adapter(folder):
    target = "dist_amp.tasks.hf_causal_lm:HFCausalLM"
    task = TaskConfig(target, {"model": str(folder), "lora_targets": "q_proj"})
    with pytest.raises(ConfigError, match="lora_targets=q_proj needs lora_rank above 0; set it"):
        build_task(replace(load_config([], environ={}), task=task))
    words = ["--task.target", target, "--task.args.model", str(folder)]
    with pytest.raises(ConfigError, match="task.args.lora_rank=-1 .*must be at least 0"):
        load_config([*words, "--task.args.lora_rank", "-1"], environ={})


@pytest.mark.bad_input(
    "a model name that is neither a folder nor on the hub, a folder without a tokenizer, or a "
    "model of another kind than the task's"
)
def test_a_model_that_is_no_folder_or_of_another_kind(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("llama_nope", "=llama_nope is no folder in .* the hub: it is not in the cache"),
        ("./absent", "task.args.model=./absent is no folder in .*; check the name"),
        (str(tmp_path / "empty"), "AutoTokenizer can't be read from .*empty: .*; give a folder"),
    ):
        with pytest.raises(DataError, match=said):
            HFCausalLM(DataConfig(), name)
    make_tokenizer(make_model(tmp_path / "t5", "t5"))
    said = "is a t5 model, for which there is no AutoModelForCausalLM"
    with pytest.raises(ConfigError, match=said):
        HFCausalLM(DataConfig(), str(tmp_path / "t5")).build_model()


OTHER_KEYS = [{"speaker": "human", "said": "hi"}]
BAD_ROWS = [
    ({"prompt": "a", "response": "b"}, "rows have the columns prompt, response; they need messag"),
    (
        {"messages": OTHER_KEYS},
        "row 0: messages holds [{'speaker': 'human', 'said': 'hi'}]; mak",
    ),
    (
        {"prompt": MESSAGES[:1], "completion": OTHER_KEYS},
        "row 0: completion holds [{'speaker': ",
    ),
    ({"messages": "hi"}, "row 0: messages holds hi; make it a list of messages, each with role"),
    ({"messages": ["hi"]}, "row 0: messages holds ['hi']; make it a list of messages"),
]


@pytest.mark.bad_input(
    "rows with other columns (prompt and response), other keys (`speaker` and `said`), or no list "
    "of messages"
)
@pytest.mark.parametrize(("row", "said"), BAD_ROWS)
def test_rows_of_another_form_are_described(row, said, folder):
    with pytest.raises(DataError) as caught:
        causal(folder, [row] * 4).build_dataset("train")
    assert str(caught.value).startswith(said)


def warnings_of(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


@pytest.mark.bad_input("rows with nothing to learn beside others")
def test_rows_that_are_left_out_are_counted_once(folder, capsys, caplog):
    rows = [{"prompt": "ab", "completion": "cd"}] * 16
    rows += [{"prompt": "abcdefgh", "completion": "i"}] * 8
    causal(folder, rows, length=4).build_dataset("train")
    (line,) = warnings_of(capsys)
    number, rows_in_all = (int(word) for word in line.split()[1:4:2])
    said = f"warning: {number} of {rows_in_all} train documents are left out: within 4 tokens they"
    assert line.startswith(said)
    assert rows_in_all == 18
    assert 2 <= number <= 8  # of the 8, all but those held out
    with caplog.at_level(logging.ERROR, "dist_amp"):  # as on the other ranks
        causal(folder, rows, length=4).build_dataset("train")
    assert not warnings_of(capsys)


@pytest.mark.bad_input("a tokenizer without `eos_token`")
def test_a_tokenizer_without_an_end_is_warned_about(folder, capsys):
    tokenizer = make_tokenizer(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    task = causal(folder, [{"text": "ab"}] * 8)
    for split in ("train", "validation"):
        task.build_dataset(split)
    (line,) = warnings_of(capsys)
    assert line.startswith("warning: the tokenizer has no eos_token, so no sample ends with one")


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


@pytest.mark.bad_input("a chat that the template can't render, or no chat template")
def test_a_chat_without_a_chat_template_and_a_broken_row(tmp_path):
    make_model(tmp_path)
    make_tokenizer(tmp_path, template=None)
    for rows, said in (
        (chats(), "^rows are chats, but the tokenizer has no chat template; use a chat model's"),
        ([{"question": "a"}] * 4, "data.text_column=text does not exist, nor messages or prompt"),
    ):
        with pytest.raises(DataError, match=said):
            causal(tmp_path, rows).build_dataset("train")


@pytest.mark.bad_input("a task whose package is not installed")
def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "dist_amp.tasks.hf_causal_lm")
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = r"failed with ModuleNotFoundError: .*transformers.*; pip install 'dist_amp\[hf\]'"
    with pytest.raises(ConfigError, match=said):
        find_task("dist_amp.tasks.hf_causal_lm:HFCausalLM")


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
