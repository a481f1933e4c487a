"""A trained model leaves as transformers' own: from_pretrained opens it with equal logits."""

import re
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, save, take_steps
from torch import nn

pytest.importorskip("transformers")
from peft import AutoPeftModelForCausalLM, PeftModel
from test_hf_tasks import TEXTS
from tiny_hf import TRANSFORMER, chats, in_own_memory, make_model, make_tokenizer, write_rows
from transformers import (
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
from dist_amp.tasks.pretrained import load_pretrained
from dist_amp.world import World

CAUSAL = "dist_amp.tasks.hf_causal_lm:HFCausalLM"
CLASSES = "dist_amp.tasks.hf_classification:HFClassification"
IDS = torch.arange(24).view(2, 12)


def trained(world, folder, target, words=""):
    """Train the folder's model for two steps and save: its logits for IDS."""
    few = "--train.steps 4 --train.micro_batch_size 2 --use_amp false --optim.lr 0.01"
    words = f"--task.target {target} --task.args.model {folder}/model {few} {words}"
    words += f" --data.path {folder}/rows.jsonl --run.dir {folder}/run"
    run = make_run(world, None, *words.split())
    take_steps(run, 2)
    save(run)
    with torch.no_grad(), run.parallel.evaluating():
        return run.parallel.module(input_ids=IDS).logits.clone()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", chats())
    return tmp_path


def model_in(folder, name, dtype=torch.float32):
    make_model(folder / "model", name, dtype)
    return make_tokenizer(folder / "model")


def exported(folder, words=""):
    return export.main(f"{folder}/run --out {folder}/out --format hf {words}".split())


def logits(model):
    with torch.no_grad():
        return in_own_memory(model)(input_ids=IDS).logits


def front_matter(path):
    _, front, body = path.read_text().split("---\n", 2)
    return dict(line.split(": ") for line in front.splitlines() if ": " in line), body


def loaded_by_card(folder):
    """(the library that the model card names, the model that its code loads)."""
    front, body = front_matter(folder / "out/README.md")
    assert "| steps | 2 of " in body
    assert str(folder) not in body
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    names = {}
    exec(code, names)  # in the folder that has both
    return front["library_name"], names["model"]


@pytest.mark.parametrize(
    ("name", "ranks", "strategy"), [("llama_tied", 2, "fsdp"), ("mixtral", 1, "single")]
)
def test_from_pretrained_opens_an_export_with_equal_logits(name, ranks, strategy, folder):
    tokenizer = model_in(folder, name)
    generation = GenerationConfig(temperature=0.3, do_sample=True, eos_token_id=[2, 5])
    generation.save_pretrained(folder / "model")
    expected = on_ranks(ranks, trained, folder, CAUSAL, f"--parallel.strategy {strategy}")[0]
    assert exported(folder) == 0
    library, model = loaded_by_card(folder)  # by AutoModelForCausalLM.from_pretrained
    assert library == "transformers"
    assert model.dtype == torch.float32
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(folder / "model")))
    assert (model.generation_config.temperature, model.generation_config.do_sample) == (0.3, True)
    ours = AutoTokenizer.from_pretrained(folder / "out")
    assert ours.get_vocab() == tokenizer.get_vocab()
    assert ours.chat_template == tokenizer.chat_template
    config = all_checkpoints(folder / "run")[-1] / CONFIG
    assert (folder / "out" / CONFIG).read_text() == config.read_text()
    assert not list(folder.glob(".out*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_leave_alone_or_merged(dtype, folder):
    model_in(folder, "llama", dtype)
    expected = trained(World(), folder, CAUSAL, "--task.args.lora_rank 2 --optim.lr 0.1")
    assert exported(folder) == 0
    assert not (folder / "out/model.safetensors").exists()
    if dtype == torch.float32:
        for kind in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
            assert torch.equal(logits(kind.from_pretrained(folder / "out")), expected)
    assert loaded_by_card(folder)[0] == "peft"
    assert exported(folder, "--merge") == 0
    assert loaded_by_card(folder)[0] == "transformers"
    assert not (folder / "out/adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert merged.dtype == torch.float32
    # W x + B A x and (W + B A) x round differently: some 2^-24 of values of about 1; in bf16 the
    # run's logits are bf16.
    close = {"atol": 1e-5} if dtype == torch.float32 else {"atol": 0.05}
    torch.testing.assert_close(logits(merged), expected.float(), rtol=0, **close)


def test_a_classifier_with_adapters_takes_its_new_head_along(folder):
    model_in(folder, "llama")
    write_rows(folder / "rows.jsonl", TEXTS)
    words = "--task.args.classes 2 --task.args.lora_rank 2"
    expected = trained(World(), folder, CLASSES, words)
    assert exported(folder, "--merge") == 0
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "out")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)  # see above
    assert exported(folder) == 0
    options = {"num_labels": 2, "pad_token_id": 0}
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", **options)
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder / "out")), expected)


def test_a_scalar_that_was_made_1_for_fsdp_is_a_scalar_in_the_export(tmp_path):
    text = {**TRANSFORMER, "vocab_size": 16, "eos_token_id": 5, "bos_token_id": 1}
    vision = {**TRANSFORMER, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    model = AutoModel.from_config(config)
    model.logit_scale = nn.Parameter(torch.zeros(1))
    load_pretrained(model, tmp_path / "model")
    with torch.no_grad():
        model.logit_scale += 1
    export.save_for_transformers(None, model, tmp_path / "out")
    opened = AutoModel.from_pretrained(tmp_path / "out")
    assert opened.logit_scale == config.logit_scale_init_value + 1
    assert opened.logit_scale.shape == ()


def test_a_card_has_the_evaluation_and_no_folder_and_the_tasks_own_stays(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    run = make_run(None, Tiny(), "--train.steps", 4, "--run.dir", tmp_path / "run")
    run.metrics.write_evaluation(0, {"loss": 1.25})
    checkpoint = save(run)
    config = load_config([], environ={})
    config = replace(config, task=TaskConfig("/home/me/my_file.py:Mine", {}))
    write_card(folder, "out", config, checkpoint, "model")
    front, body = front_matter(folder / "README.md")
    assert front == {"library_name": "pytorch"}
    assert "| task | my_file.py:Mine |" in body
    assert "| held out | loss 1.2500 (step 0) |" in body
    assert "from my_file import Mine\n" in body
    (folder / "README.md").write_text("the task's own")
    write_card(folder, "out", config, checkpoint, "model")
    assert (folder / "README.md").read_text() == "the task's own"
