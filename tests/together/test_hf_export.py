"""A trained model leaves as transformers' own: from_pretrained opens it with equal logits."""

import json
import re
import time
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, save, take_steps, whole
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("transformers")
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from test_hf_tasks import TEXTS
from tiny_hf import TRANSFORMER, chats, in_own_memory, make_model, make_tokenizer, write_rows
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPConfig,
    GenerationConfig,
)

from dist_amp.checkpoint.format import CONFIG, all_checkpoints
from dist_amp.commands import export
from dist_amp.commands.model_card import write_card
from dist_amp.config.load import load_config
from dist_amp.settings import TaskConfig
from dist_amp.tasks.pretrained import as_published, load_pretrained

CAUSAL = "dist_amp.tasks.hf_causal_lm:HFCausalLM"
CLASSES = "dist_amp.tasks.hf_classification:HFClassification"
PLAIN = "tiny:Tiny"
IDS = torch.arange(24).view(2, 12)


def saved(world, folder, target, words=""):
    """Train two steps and save: the logits of the trained model."""
    few = "--train.steps 4 --train.micro_batch_size 2 --use_amp false --optim.lr 0.01"
    words = f"--run.dir {folder}/run --task.target {target} {few} {words}"
    run = make_run(world, None, *words.split())
    take_steps(run, 2)
    save(run)
    with torch.no_grad(), run.parallel.evaluating():
        return None if target == PLAIN else run.parallel.module(input_ids=IDS).logits.clone()


def trained(ranks, folder, target, words=""):
    """`saved` on this many ranks, for the folder's model and rows."""
    words = f"--task.args.model {folder}/model --data.path {folder}/rows.jsonl {words}"
    return on_ranks(ranks, saved, folder, target, words)[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", chats())
    return tmp_path


def model_in(folder, name, dtype=torch.float32):
    make_model(folder / "model", name, dtype)
    return make_tokenizer(folder / "model")


def exported(folder, words=""):
    """The exit status of the export of the folder's run."""
    words = f"{folder}/run --out {folder}/out --format hf {words}"
    return export.main(words.split())


def logits(model):
    with torch.no_grad():
        return in_own_memory(model)(input_ids=IDS).logits


@pytest.mark.parametrize(("name", "ranks"), [("llama_tied", 2), ("mixtral", 1)])
def test_from_pretrained_opens_an_export_with_equal_logits(name, ranks, folder):
    """Experts are written one by one again, as in the hub's files."""
    tokenizer = model_in(folder, name)
    strategy = "fsdp" if ranks > 1 else "auto"
    expected = trained(ranks, folder, CAUSAL, f"--parallel.strategy {strategy}")
    assert exported(folder) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(folder / "model")))
    ours = AutoTokenizer.from_pretrained(folder / "out")
    assert ours.get_vocab() == tokenizer.get_vocab()
    assert ours.chat_template == tokenizer.chat_template
    config = all_checkpoints(folder / "run")[-1] / CONFIG
    assert (folder / "out" / CONFIG).read_text() == config.read_text()
    assert not list(folder.glob(".out*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_leave_alone_or_merged(dtype, folder):
    model_in(folder, "llama", dtype)
    expected = trained(1, folder, CAUSAL, "--task.args.lora_rank 2 --optim.lr 0.1")
    assert exported(folder) == 0
    assert not (folder / "out" / "model.safetensors").exists()
    assert json.loads((folder / "out" / "adapter_config.json").read_text())["r"] == 2
    size = (folder / "out" / "adapter_model.safetensors").stat().st_size
    assert size < (folder / "model" / "model.safetensors").stat().st_size
    if dtype == torch.float32:
        for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
            assert torch.equal(logits(kind.from_pretrained(folder / "out")), expected)
    assert exported(folder, "--merge") == 0
    assert not (folder / "out" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert merged.dtype == torch.float32
    # W x + B A x and (W + B A) x round differently: some 2^-24 of values of about 1; in bf16 the
    # run's logits are bf16.
    close = {"atol": 1e-5} if dtype == torch.float32 else {"atol": 0.05}
    torch.testing.assert_close(logits(merged), expected.float(), rtol=0, **close)


def test_a_classifier_with_adapters_takes_its_new_head_along(folder):
    model_in(folder, "llama")
    write_rows(folder / "rows.jsonl", TEXTS)
    expected = trained(1, folder, CLASSES, "--task.args.classes 2 --task.args.lora_rank 2")
    assert exported(folder, "--merge") == 0
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    assert merged.num_labels == 2
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)  # see above
    assert exported(folder) == 0
    options = {"num_labels": 2, "pad_token_id": 0}
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", **options)
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder / "out")), expected)


@pytest.mark.bad_input(
    "`export --merge` without adapters or without `--format hf`; a model that has no "
    "`save_pretrained`; `--out` with other files"
)
@pytest.mark.parametrize(
    ("target", "words", "message"),
    [
        (CAUSAL, "--merge", "--merge needs a model with adapters of peft"),
        (CAUSAL, "--merge --format safetensors", "--merge is for --format hf"),
        (CAUSAL, "--out full", "holds other files, and would be replaced; give the ex"),
        (PLAIN, "", "Sequential has no save_pretrained; add `def export("),
    ],
)
def test_what_can_not_be_exported_is_refused_in_one_line(target, words, message, folder, capsys):
    model_in(folder, "llama")
    if target == CAUSAL:
        trained(1, folder, CAUSAL)
    else:
        on_ranks(1, saved, folder, PLAIN)
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").touch()
    capsys.readouterr()
    assert exported(folder, words) == 64
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert (folder / "full" / "thesis.txt").exists()


@pytest.mark.slow
def test_the_whole_way_from_files_to_files(folder, launch):
    """Train on two ranks, kill them, resume on one, export, load in transformers, generate."""
    model_in(folder, "llama_tied")
    words = (
        f"--task.target {CAUSAL} --task.args.model model --data.path rows.jsonl --run.dir run "
        "--train.steps 300 --train.global_batch_size 8 --train.micro_batch_size 4 --optim.lr 1e-2 "
        "--optim.warmup_steps 10 --checkpoint.every 10 --use_amp false"
    ).split()
    ranks = launch.start_each(2, *words, "--parallel.strategy", "fsdp")
    try:
        deadline = time.monotonic() + 100
        while not all_checkpoints(folder / "run") and time.monotonic() < deadline:
            assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[1]
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()  # SIGKILL
    for rank in ranks:
        assert rank.wait(30) == -9
    resumed = launch(0, *words)
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["resumed_from_step"] >= 10
    assert (summary["steps"], summary["world_size"]) == (300, 1)
    written = launch.module("dist_amp.export", "run", "--out", "out", "--format", "hf")
    assert written.returncode == 0, written.stderr
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    chat = [{"role": "user", "content": "say 3"}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    ids = tokenizer.apply_chat_template(chat, **options)
    answer = model.generate(**ids, max_new_tokens=30, do_sample=False)[0]
    answer = answer[ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "abababab"  # chats()[3]


# ---- what an own task's model would lose ----


class OwnTask:
    """As docs/huggingface.md shows it: a model built of a config, which has no other files."""

    def __init__(self, model: str):
        self.model = model

    def build_model(self):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model))

    def load(self, model):
        load_pretrained(model, self.model)

    def build_dataset(self, split):
        return [{"input_ids": torch.arange(8) + number} for number in range(16)]

    def loss_sum(self, model, batch):
        logits = model(batch["input_ids"]).logits[:, :-1].float()
        return cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()) * 7

    def weight(self, batch):
        return batch["input_ids"][:, 1:].numel()


OWN = "test_hf_export:OwnTask"


def saved_own(world, folder, target, *words):
    few = f"--train.steps 4 --train.micro_batch_size 2 --use_amp false --run.dir {folder}/run"
    words = [*few.split(), "--task.target", target, "--task.args.model", f"{folder}/model", *words]
    run = make_run(world, None, *words)
    take_steps(run, 2)
    save(run)
    return {name: whole(p) for name, p in run.parallel.module.named_parameters()}


def test_an_own_tasks_model_keeps_the_generation_config_of_its_files(folder):
    model_in(folder, "llama")
    theirs = GenerationConfig(
        do_sample=True, temperature=0.3, max_new_tokens=7, eos_token_id=[2, 5]
    )
    theirs.save_pretrained(folder / "model")
    saved_own(None, folder, OWN)
    assert exported(folder) == 0
    ours = GenerationConfig.from_pretrained(folder / "out")
    assert ours.to_diff_dict() == GenerationConfig.from_pretrained(folder / "model").to_diff_dict()
    model = OwnTask(str(folder / "model")).build_model()
    model.generation_config.max_new_tokens = 3
    as_published(model)
    assert model.generation_config.max_new_tokens == 3, "what the task has set is kept"
    assert model.generation_config.temperature != 0.3


class Clip:
    """Pairs of an image and a text; a scalar is made [1], as FSDP2 asks for."""

    def __init__(self, model: str):
        self.model = model

    def build_model(self):
        model = AutoModel.from_config(AutoConfig.from_pretrained(self.model))
        model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
        return model

    def load(self, model):
        load_pretrained(model, self.model)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(16, 3, 16, 16, generator=generator)
        return [{"pixel_values": one, "input_ids": torch.arange(6)} for one in images]

    def loss_sum(self, model, batch):
        logits = model(**batch).logits_per_image.float()
        return (logits - 1).square().sum()

    def weight(self, batch):
        return len(batch["input_ids"])


def test_a_scalar_that_was_made_1_for_fsdp_is_a_scalar_in_the_export(folder):
    text = {**TRANSFORMER, "vocab_size": 16, "eos_token_id": 5, "bos_token_id": 1}
    vision = {**TRANSFORMER, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    published = AutoModel.from_config(config)
    published.save_pretrained(folder / "model")
    target = "test_hf_export:Clip"
    expected = on_ranks(2, saved_own, folder, target, "--parallel.strategy", "fsdp")[0]
    assert expected["logit_scale"].shape == (1,)
    assert expected["logit_scale"] != published.logit_scale
    assert exported(folder) == 0
    model = AutoModel.from_pretrained(folder / "out")
    assert model.logit_scale.shape == ()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].reshape(parameter.shape)), name


# ---- the model card ----


def front_matter(path):
    _, front, body = path.read_text().split("---\n", 2)
    return dict(line.split(": ") for line in front.splitlines() if ": " in line), body


@pytest.mark.parametrize(
    ("rank", "words", "library"),
    [(0, "", "transformers"), (2, "--merge", "transformers"), (2, "", "peft")],
)
def test_an_export_has_a_card_that_says_what_it_is_and_how_to_load_it(
    rank, words, library, folder, capsys
):
    model_in(folder, "llama")
    trained(1, folder, CAUSAL, f"--task.args.lora_rank {rank} --eval.every 2")
    assert exported(folder, words) == 0
    front, body = front_matter(folder / "out" / "README.md")
    assert front["library_name"] == library
    assert front.get("base_model") is None, "a folder is no name on the hub"
    for text in (
        "| base model | model |",
        "| task | dist_amp.tasks.hf_causal_lm:HFCausalLM |",
        "| data | rows.jsonl |",
        "| steps | 2 of 2 samples |",
        "trained in fp32",
        f"torch {torch.__version__}",
        "transformers",
    ):
        assert text in body
    assert str(folder) not in body
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    names = {}
    exec(code, names)  # in the folder that has both
    kind = names["base" if library == "peft" else "model"]
    assert type(kind).__name__ == "LlamaForCausalLM"
    if library == "peft":
        weights = load_file(folder / "out/adapter_model.safetensors").values()
        count = sum(each.numel() for each in weights)
        assert f"out: {count:,} parameters of adapters (model) in fp32" in capsys.readouterr().out


def test_a_model_of_the_hub_and_data_with_a_password_are_named_without_it(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    run = make_run(None, Tiny(), "--train.steps", 4, "--run.dir", tmp_path / "run")
    run.metrics.write_evaluation(0, {"loss": 1.25})
    checkpoint = save(run)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "train/loss": 2.5}\n{"st\n12\n')
    config = load_config([], environ={})
    path = "s3://key:hush@bucket/a/chats.jsonl?signature=hush"
    task = TaskConfig("my_file:Mine", {"model": "Qwen/Qwen2.5-0.5B"})
    config = replace(config, task=task, data=replace(config.data, path=path))
    write_card(folder, "out", config, checkpoint, "model")
    front, body = front_matter(folder / "README.md")
    assert front == {"library_name": "transformers", "base_model": "Qwen/Qwen2.5-0.5B"}
    assert "| data | chats.jsonl |" in body
    assert "| training loss | 2.5000 (step 0) |" in body
    assert "| held out | loss 1.2500 (step 0) |" in body
    assert "hush" not in body
    (folder / "README.md").write_text("the task's own")
    write_card(folder, "out", config, checkpoint, "model")
    assert (folder / "README.md").read_text() == "the task's own"
