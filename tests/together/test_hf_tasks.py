"""Fine-tuning tasks for Hugging Face models: what is learned, padding, LoRA, and bad inputs."""

import math
from shutil import copytree

import pytest
import torch
from conftest import ROOT
from messages import message_of
from ranks import on_ranks
from tiny import make_run, parameters_of, save, take_steps

pytest.importorskip("transformers")
import datasets
from PIL import Image
from tiny_hf import MODELS, QUICK, TEMPLATE, chats, make_model, make_tokenizer, write_rows
from transformers import AutoModelForCausalLM, ViTImageProcessorPil

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig
from dist_amp.sources.conversations import IGNORE_INDEX
from dist_amp.sources.load import class_names, load_split
from dist_amp.step import evaluate
from dist_amp.tasks.hf_causal_lm import HFCausalLM
from dist_amp.tasks.hf_classification import HFClassification
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("own_cache")
CPU = torch.device("cpu")


def causal(folder, rows, **options):
    """The task on these rows, with its model and tokenizer in the same folder."""
    data = DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)
    return HFCausalLM(data, str(folder), **options)


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(make_model(tmp_path, "llama_tied"))
    return tmp_path


def batch_of(task):
    """(a batch of four samples, its tensors)."""
    batch = task.collate([task.build_dataset("train")[number] for number in range(4)])
    return batch, {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("chunk", ["auto", 5, "off"])
def test_loss_and_metrics_are_those_of_transformers_and_padding_changes_no_samples(chunk, folder):
    task = causal(folder, chats(), loss_chunk=chunk)
    samples = [task.build_dataset("train")[number] for number in range(4)]
    model, (batch, tensors) = build_whole(task, CPU).eval(), batch_of(task)
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
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(**tensors)
    torch.testing.assert_close(together / task.weight(batch), theirs.loss)
    hits = theirs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    values = {name: float(value) for name, value in task.metrics(model, batch).items()}
    assert values == pytest.approx({"loss": float(together), "accuracy": int(hits.sum())}, rel=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_mixtures_auxiliary_loss_is_added_as_transformers_does_and_weighted(name, tmp_path):
    make_tokenizer(make_model(tmp_path, name))
    task = causal(tmp_path, chats())
    model, (batch, tensors) = build_whole(task, CPU), batch_of(task)
    assert model.training
    theirs = model(**tensors, output_router_logits=True)
    assert theirs.aux_loss > 0
    torch.testing.assert_close(task.loss_sum(model, batch) / task.weight(batch), theirs.loss)
    without = model(**tensors)
    evaluated = task.loss_sum(model.eval(), batch) / task.weight(batch)
    torch.testing.assert_close(evaluated, without.loss)


LORA = {"lora_rank": 2, "sample_tokens": 5, "loss_chunk": 5}


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


@pytest.mark.parametrize(
    ("options", "dtype", "strategy"),
    [({}, torch.float32, "ddp"), (LORA, torch.bfloat16, "fsdp")],
)
def test_fine_tuning_on_two_ranks_is_that_on_one_which_continues_it(
    options, dtype, strategy, tmp_path
):
    """FSDP2 shards adapters and frozen weights alike, and a sample is made by the sharded model. A
    checkpoint has the adapters alone; the frozen weights come from the files again.
    """
    make_tokenizer(make_model(tmp_path / "one", "llama_tied", dtype))
    copytree(tmp_path / "one", tmp_path / "two")
    before, after, values, text = continued(World(), tmp_path / "one", "single", options, 2)
    assert values.keys() == {"loss", "accuracy"}
    assert text.startswith("Hello")
    trained = {name for name in after if "lora_" in name or not options}
    for rank in on_ranks(2, continued, tmp_path / "two", strategy, options, 2):
        torch.testing.assert_close(rank[0], before, rtol=0, atol=0)
        # Two steps of 0.05 times gradients of at most some units, which are sums in another
        # order: 2^-24 of each.
        torch.testing.assert_close(rank[1], after, rtol=0, atol=1e-6)
        assert rank[2] == pytest.approx(values, rel=1e-5)
        assert rank[3] == text
    before, after, *_ = continued(World(), tmp_path / "two", "single", options, 4)
    torch.testing.assert_close(before, rank[1], rtol=0, atol=0)
    assert {name for name in after if not torch.equal(after[name], before[name])} == trained
    parameters = list(build_whole(causal(tmp_path / "one", [], **options), CPU).parameters())
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters if not p.requires_grad} == ({dtype} if options else set())


WORDS = [(0, "a"), (1, "b")]
TEXTS = [{"text": word * n, "label": label} for n in (1, 2, 3) * 4 for label, word in WORDS]

LEARNS = "--train.steps 16 --train.micro_batch_size 8 --optim.lr 1e-2".split()


@pytest.mark.parametrize(("name", "rank"), [("bert_base", 0), ("llama", 2), ("vit", 0)])
def test_texts_and_images_are_classified_by_a_new_head_or_the_files_own(name, rank, tmp_path):
    make_tokenizer(make_model(tmp_path, name))
    classes, options = 2, {"lora_rank": rank}
    if name == "vit":
        classes, options = 3, {"of": "image"}
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
        colors = [(100 * label + number,) * 3 for number in range(8) for label in range(3)]
        images = [Image.new("RGB", (16, 16), color) for color in colors]
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2] * 8})
        rows.cast_column("image", datasets.Image()).to_parquet(tmp_path / "rows.parquet")
        data = DataConfig(path=str(tmp_path / "rows.parquet"), text_column="image")
    else:
        data = DataConfig(path=str(write_rows(tmp_path / "rows.jsonl", TEXTS)))
    task = HFClassification(data, str(tmp_path), classes=classes, **options)
    run = make_run(World(), task, *QUICK, *LEARNS)
    take_steps(run, 16)
    values = evaluate(run)
    assert values["accuracy"] == 1
    assert values["loss"] < math.log(classes) / 2  # half of what guessing costs


@pytest.mark.bad_input("labels of more classes than `task.args.classes`, or of none")
def test_text_labels_are_numbered_as_those_of_images_are_and_others_are_refused(tmp_path):
    def classifier(classes):
        data = DataConfig(path=str(tmp_path / "rows.csv"), validation_split="train")
        return HFClassification(data, str(tmp_path), classes=classes)

    make_tokenizer(make_model(tmp_path, "bert"))
    labels = ["None", "good", "00042", "bad"] * 4
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"a,{one}\n" for one in labels))
    task = classifier(4)
    samples = list(task.build_dataset("train"))
    numbers = [["00042", "None", "bad", "good"].index(label) for label in labels]
    assert task.collate(samples)["labels"].tolist() == numbers
    assert task.names == class_names(load_split(task.data, "train"), "label")
    for label in ("w", None, 1.5):
        with pytest.raises(ValueError, match=f"label {label} is not one of task.args.classes="):
            task.collate([{"text": "c", "label": label}])
    text = message_of(65, classifier(2).build_dataset, "train")
    assert "the column label names 4 classes, such as 00042, None, bad" in text


@pytest.mark.parametrize(
    ("template", "seen"), [(TEMPLATE, "<user>Hello</s><assistant>"), (None, "Hello")]
)
def test_a_sample_is_an_answer_if_the_tokenizer_has_a_chat_template(
    template, seen, folder, monkeypatch
):
    task = causal(folder, [], sample_tokens=3)
    tokenizer = task.tokenizer
    tokenizer.chat_template = template
    model = build_whole(task, CPU).eval()
    asked, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **ids: asked.append(ids) or generate(**ids))
    text = task.sample(model)
    assert tokenizer.decode(asked[0]["input_ids"][0]) == seen
    assert text.startswith("Hello\n" if "user" in seen else "Hello")


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


QUERY = {"args.lora_rank": "2", "args.lora_targets": "q_proj,query"}


@pytest.mark.bad_input("a LoRA target that matches no layer, or without `lora_rank`")
@pytest.mark.bad_input("a model that is no folder nor on the hub, or of another kind")
@pytest.mark.parametrize(
    ("name", "options", "status", "message"),
    [
        ("llama", QUERY, 64, "'query' matches no layer of LlamaForC"),
        ("llama", {"args.lora_targets": "q_proj"}, 64, "=q_proj needs lora_rank above 0; set it"),
        ("llama_nope", {}, 65, "can't be fetched from the hub: "),
        ("empty", {}, 65, "AutoTokenizer can't be read from empty: "),
        ("t5", {}, 64, "is a t5 model, for which there is no AutoModelForCausalLM"),
    ],
)
def test_a_model_that_is_no_folder_or_does_not_fit_is_refused(
    name, options, status, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if name in MODELS:
        make_tokenizer(make_model(tmp_path / name, name))
    options = {"target": "dist_amp.tasks.hf_causal_lm:HFCausalLM", "args.model": name} | options
    words = [word for key, value in options.items() for word in (f"--task.{key}", value)]
    config = load_config(words, environ={})
    assert message in message_of(status, lambda: build_task(config).build_model())


@pytest.mark.bad_input("a tokenizer with more tokens than the model's embedding, or no `eos_token`")
def test_a_tokenizer_that_does_not_fit_is_refused_and_one_without_an_end_warned_about_once(
    folder, capsys
):
    tokenizer = make_tokenizer(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    task = causal(folder, [{"text": "ab"}] * 8)
    for split in ("train", "validation"):
        task.build_dataset(split)
    assert capsys.readouterr().err.count("warning: the tokenizer has no eos_token") == 1
    make_tokenizer(folder, extra=3)
    text = message_of(65, causal(folder, chats()).build_model)
    assert "has 263 tokens and the model's embedding 260 rows; use the model's own" in text
