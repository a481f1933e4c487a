"""Packed documents see nothing of one another, packed equals unpacked, and a leak is named."""

import re

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from ranks import on_ranks
from test_causal_lm_packing import Documents
from tiny import make_run, take_steps
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.settings import DataConfig
from dist_amp.sources.packing import Packing
from dist_amp.supervise.callbacks import train_metrics
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.verify.findings import inspect_task, leaks
from dist_amp.verify.reference import Reference
from dist_amp.world import World

VOCABULARY = 256
WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LLAMA = {**WIDTHS, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_key_value_heads": 2}


class Packed:
    """Random documents in rows of 24 tokens; the model and its call are the subclass's."""

    packing = Packing(24, "best_fit", "split")
    collate = packing.collate

    def build_dataset(self, split):
        return self.packing.rows(Documents.random(600, 2, 20, VOCABULARY), split)

    def weight(self, batch):
        return batch["counted"]

    def loss_sum(self, model, batch):
        logits = self.logits(model, batch)[:, :-1].float().flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")


class OfTheGPT(Packed):
    """The shipped model and its loss, whole or in chunks."""

    def __init__(self, loss_chunk="off"):
        shape = {"context": 23, "width": 32, "layers": 2, "heads": 2, "vocabulary": VOCABULARY}
        self.task = CausalLM(DataConfig(pack="best_fit"), **shape, loss_chunk=loss_chunk)
        self.build_model, self.loss_sum = self.task.build_model, self.task.loss_sum
        self.collate = self.task.collate


class OfLlama(Packed):
    """transformers' Llama, called with `inputs` as well; ones: with an attention mask of ones."""

    def __init__(self, attention="sdpa", ones=False, **inputs):
        self.attention, self.ones, self.inputs = attention, ones, inputs

    def build_model(self):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(**LLAMA, attn_implementation=self.attention)
        return transformers.LlamaForCausalLM(config)

    def logits(self, model, batch):
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        if self.ones:
            inputs["attention_mask"] = torch.ones_like(batch["input_ids"])
        return model(**inputs, **self.inputs).logits


class OfALayer(Packed):
    """An embedding or one-hot tokens, a layer between them, a head; no attention."""

    def __init__(self, layer, embedding=nn.Embedding):
        super().__init__()
        self.layer, self.embedding = layer, embedding

    def build_model(self):
        embedding = self.embedding(VOCABULARY, 16)
        parts = {"embedding": embedding, "layer": self.layer(), "head": nn.Linear(16, VOCABULARY)}
        return nn.ModuleDict(parts)

    def logits(self, model, batch):
        ids = batch["input_ids"]
        if self.embedding is nn.Linear:
            ids = F.one_hot(ids, VOCABULARY).float()
        x = model["layer"](model["embedding"](ids).transpose(1, 2))[..., : ids.shape[1]]
        return model["head"](x.transpose(1, 2))


GPT, CHUNKED, SDPA = OfTheGPT(), OfTheGPT(loss_chunk=8), OfLlama(use_cache=False)
NAMES = ["gpt", "gpt_in_chunks", "llama", "llama_eager"]


def reference_of(task):
    return Reference(load_config([], environ={}), torch.device("cpu"), task)


@pytest.mark.parametrize("task", [GPT, CHUNKED, SDPA, OfLlama("eager", use_cache=False)], ids=NAMES)
def test_a_documents_loss_has_no_gradient_with_respect_to_another_documents_embeddings(task):
    findings = inspect_task(reference_of(task))
    assert [finding.text for finding in findings if finding.fails] == []
    texts = "\n".join(finding.text for finding in findings)
    assert "no cross-document attention in packed rows: 8 rows, gradient exactly 0" in texts


LLAMAS = "model.layers.0.self_attn (LlamaAttention)"


@pytest.mark.bad_input("a task whose packed documents leak through a cache, in `verify`")
@pytest.mark.bad_input("the same through an attention mask of ones")
@pytest.mark.bad_input("the same through batch norm or a convolution")
@pytest.mark.parametrize(
    ("task", "where", "cause"),
    [
        (OfLlama(), LLAMAS, "use_cache at its default, true.* call it with use_cache=False"),
        (
            OfLlama(use_cache=False, ones=True),
            LLAMAS,
            "an attention_mask of ones.* leave attention_",
        ),
        (OfALayer(lambda: nn.BatchNorm1d(16)), "layer (BatchNorm1d)", "without regard to position"),
        (OfALayer(lambda: nn.Conv1d(16, 16, 4, padding=3)), "layer (Conv1d)", "without regard to"),
    ],
    ids=["cache", "ones", "batch_norm", "convolution"],
)
def test_a_leak_is_named_with_the_module_it_begins_in_and_its_fix(task, where, cause):
    (text,) = [finding.text for finding in inspect_task(reference_of(task)) if finding.fails]
    assert text.startswith(f"packed documents leak in {where}: ")
    assert re.search(cause, text)


@pytest.mark.bad_input("a packed task in which `verify` finds no embedding of input_ids")
def test_a_model_without_an_embedding_of_the_tokens_is_not_passed_in_silence():
    (finding,) = leaks(reference_of(OfALayer(nn.Identity, embedding=nn.Linear)), rows=8)
    assert "not checked for leaks: no nn.Embedding" in finding.text
    assert not finding.fails


def test_rows_with_a_second_document_are_looked_for_and_if_there_are_none_a_line_says_so():
    class Task(OfTheGPT):
        def build_dataset(self, split):
            return self.packing.rows(self.documents, split)

    alone, pairs = ([torch.ones(24)] * 250, [torch.ones(12)] * 4)
    for documents, words in (
        (alone, "no row of 240 has a second one that counts"),
        (alone[:238] + pairs, "exactly 0"),
    ):
        task = Task()
        task.documents = Documents(documents)
        (finding,) = leaks(reference_of(task), rows=8)
        assert words in finding.text
        assert not finding.fails


# Packed equals unpacked.


def gradients_and_loss(task, batches):
    torch.manual_seed(0)
    model = task.build_model()
    losses = []
    for batch in batches:
        loss = task.loss_sum(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("task", [GPT, CHUNKED, SDPA], ids=NAMES[:3])
def test_packed_documents_have_the_loss_and_the_gradients_of_each_alone(task):
    documents = Documents.random(40, 2, 24, VOCABULARY)
    together = [task.collate(list(task.packing.rows(documents, "train")))]
    alone = [
        task.collate([{**one, "position_ids": torch.arange(len(one["input_ids"]))}])
        for one in documents
    ]
    loss, gradients = gradients_and_loss(task, together)
    expected, each = gradients_and_loss(task, alone)
    tokens = sum(batch["counted"] for batch in alone)
    assert tokens == together[0]["counted"] > 400
    # Both add the same terms, in another order: a sum of n rounded terms is off by at most n u sum
    # |term|, and by about sqrt(n) u for independent roundings (Higham 2002, 4.2). n is the counted
    # tokens; the terms of a loss are positive. Each term went through some 10 products of 32 to 256
    # terms, whose own roundings differ with the kernel's blocking: another sqrt(10 * 256) u. Twice
    # their sum, since either side has it.
    bound = 2 * 2.0**-24 * (tokens**0.5 + (10 * 256) ** 0.5)
    assert abs(loss - expected) <= bound * expected
    for name, gradient in gradients.items():
        # A gradient's terms have both signs; their size is that of the largest token's, so n of
        # them in place of one.
        largest = each[name].abs().max()
        assert (gradient - each[name]).abs().max() <= bound * tokens**0.5 * largest, name


# Hugging Face's task.


def packed_run(world, folder, words=""):
    words = (
        f"--task.target dist_amp.tasks.hf_causal_lm:HFCausalLM --task.args.model {folder} "
        f"--task.args.length 32 --data.path {folder}/rows.jsonl --data.pack best_fit "
        f"--run.dir {folder}/run --train.steps 4 --train.micro_batch_size 2 {words}"
    )
    return make_run(world, None, *words.split())


def write_model(folder, model):
    from tiny_hf import chats, make_model, make_tokenizer, write_rows

    make_model(folder, model)
    make_tokenizer(folder)
    rows = [{"text": row["messages"][1]["content"]} for row in chats(200)]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def packed_steps(world, folder, strategy):
    """Two steps, with the check after the first: padding, whether in training, weight, counted."""
    run = packed_run(world, folder, f"--parallel.strategy {strategy}")
    (report,) = take_steps(run, 1)
    counted = (run.data.last_step[0][0]["labels"][:, 1:] != -100).sum()
    padding = train_metrics(run, report)["train/padding_pct"]
    take_steps(run, 1)
    return padding, run.parallel.module.training, report.weight, world.sum(counted)


@pytest.mark.parametrize(
    ("model", "strategy", "ranks"), [("llama", "fsdp", 2), ("mixtral", "single", 1)]
)
def test_a_hugging_face_model_that_tells_documents_apart_trains_on_packed_rows(
    tmp_path, model, strategy, ranks
):
    folder = write_model(tmp_path, model)
    for padding, is_training, weight, counted in on_ranks(ranks, packed_steps, folder, strategy):
        assert padding < 20
        assert is_training
        assert weight == counted


@pytest.mark.bad_input("`data.pack=best_fit` with a model that attends across packed documents")
def test_a_model_that_leaks_is_refused_at_the_first_log_step(tmp_path, monkeypatch):
    import tiny_hf
    from transformers import AutoModelForCausalLM, MambaConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = MambaConfig(vocab_size=tiny_hf.VOCABULARY, **sizes)
    monkeypatch.setitem(tiny_hf.MODELS, "mamba", (AutoModelForCausalLM, config))
    run = packed_run(World(), write_model(tmp_path, "mamba"))
    (report,) = take_steps(run, 1)
    text = message_of(64, run.task.train_metrics, run, report)
    assert text.startswith("data.pack=best_fit needs a model that separates ")
    assert text.endswith(" use data.pack=off")


@pytest.mark.bad_input("`task.args.length` above the model's max_position_embeddings")
def test_rows_longer_than_the_models_positions_are_refused(tmp_path):
    write_model(tmp_path, "llama")
    text = message_of(64, packed_run, World(), tmp_path, words="--task.args.length 4096")
    assert text.startswith("task.args.length=4096 is more than the model's 2048 positions")
