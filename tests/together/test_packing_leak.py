"""Packed documents see nothing of one another, packed equals unpacked, and a leak is named."""

import re
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from ranks import on_ranks
from test_causal_lm_packing import Documents
from test_verify import inspected
from tiny import make_run, take_steps

pytest.importorskip("transformers")
import tiny_hf
import transformers

from dist_amp.config.load import load_config
from dist_amp.settings import DataConfig
from dist_amp.sources.packing import Packing
from dist_amp.supervise.callbacks import train_metrics
from dist_amp.tasks import hf_causal_lm
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.tasks.huggingface import inputs_of
from dist_amp.tasks.packed_attention import document_bounds
from dist_amp.verify.reference import Reference
from dist_amp.world import World

VOCABULARY = 256
LLAMA = {**tiny_hf.LLAMA, "vocab_size": VOCABULARY}


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

    def __init__(self, **options):
        shape = {"context": 23, "width": 32, "layers": 2, "heads": 2, "vocabulary": VOCABULARY}
        self.task = CausalLM(DataConfig(pack="best_fit"), **shape, **options)
        self.build_model, self.loss_sum = self.task.build_model, self.task.loss_sum
        self.blocks, self.collate = self.task.blocks, self.task.collate


class OfLlama(Packed):
    """transformers' Llama, called with `inputs` as well; ones: with an attention mask of ones;
    indexed: with the rows of its embedding, which is not called.
    """

    def __init__(self, ones=False, indexed=False, **inputs):
        self.ones, self.indexed, self.inputs = ones, indexed, inputs

    def build_model(self):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))

    def logits(self, model, batch):
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        if self.ones:
            inputs["attention_mask"] = torch.ones_like(batch["input_ids"])
        if self.indexed:
            ids = inputs.pop("input_ids")
            inputs["inputs_embeds"] = model.get_input_embeddings().weight[ids]
        return model(**inputs, **self.inputs).logits


GPT, CHUNKED, LLAMA_TASK = OfTheGPT(), OfTheGPT(loss_chunk=8), OfLlama(use_cache=False)


@pytest.mark.bad_input("a task whose packed documents leak: a cache, a mask of ones")
@pytest.mark.bad_input("a packed task in which `verify` finds no embedding of input_ids")
@pytest.mark.parametrize(
    ("task", "fails", "said"),
    [
        (GPT, False, "no cross-document attention in packed rows: 8 rows, gradient exactly 0"),
        (LLAMA_TASK, False, "no cross-document attention in packed rows: 8 rows, gradient exact"),
        (OfLlama(), True, "packed documents leak: .*and must be 0; call .* with use_cache=False"),
        (OfLlama(ones=True, use_cache=False), True, "without an attention_mask of ones"),
        (OfLlama(indexed=True), False, "not checked for leaks, which needs an nn.Embedding"),
    ],
    ids=["gpt", "llama", "cache", "ones", "indexed"],
)
def test_a_loss_that_depends_on_another_documents_embeddings_fails_with_its_fix(task, fails, said):
    notes, failure = inspected(Reference(load_config([], environ={}), torch.device("cpu"), task))
    assert bool(failure) == fails
    assert re.search(said, failure or "\n".join(notes))


def gradients_and_loss(task, batches):
    torch.manual_seed(0)
    model = task.build_model()
    losses = []
    for batch in batches:
        loss = task.loss_sum(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("task", [GPT, CHUNKED, LLAMA_TASK], ids=["gpt", "chunked", "llama"])
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
    # The same terms in another order: n rounded terms are off by about sqrt(n) u (Higham 2002,
    # 4.2), n being the counted tokens. Each went through some 10 products of 32 to 256 terms, whose
    # roundings differ too: another sqrt(10 * 256) u. Twice their sum, since either side has it.
    bound = 2 * 2.0**-24 * (tokens**0.5 + (10 * 256) ** 0.5)
    assert abs(loss - expected) <= bound * expected
    for name, gradient in gradients.items():
        # A gradient's terms have both signs; their size is that of the largest token's, so n of
        # them in place of one.
        largest = each[name].abs().max()
        assert (gradient - each[name]).abs().max() <= bound * tokens**0.5 * largest, name


def packed_run(world, folder, words=""):
    words = (
        f"--task.target dist_amp.tasks.hf_causal_lm:HFCausalLM --task.args.model {folder} "
        f"--task.args.length 32 --data.path {folder}/rows.jsonl --data.pack best_fit "
        f"--run.dir {folder}/run --train.steps 4 --train.micro_batch_size 2 {words}"
    )
    return make_run(world, None, *words.split())


def write_model(folder, model):
    tiny_hf.make_model(folder, model)
    tiny_hf.make_tokenizer(folder)
    rows = [{"text": row["messages"][1]["content"]} for row in tiny_hf.chats(200)]
    tiny_hf.write_rows(folder / "rows.jsonl", rows)
    return folder


def packed_steps(world, folder, strategy):
    """Two steps, with the check after the first: padding, whether in training, weight, counted, and
    what is said if the last rank finds a leak.
    """
    run = packed_run(world, folder, f"--parallel.strategy {strategy}")
    (report,) = take_steps(run, 1)
    counted = (run.data.last_step[0][0]["labels"][:, 1:] != -100).sum()
    padding = train_metrics(run, report)["train/padding_pct"]
    take_steps(run, 1)
    share = 0.5 * (world.rank + 1 == world.world_size)
    with patch.object(hf_causal_lm, "leaked_share", lambda *_: share):
        leak = message_of(64, hf_causal_lm.check_documents_are_apart, run, "auto")
    return padding, run.parallel.module.training, report.weight, world.sum(counted), leak


@pytest.mark.parametrize(
    ("model", "strategy", "ranks"), [("llama", "fsdp", 2), ("mixtral", "single", 1)]
)
def test_a_hugging_face_model_that_tells_documents_apart_trains_on_packed_rows(
    tmp_path, model, strategy, ranks
):
    folder = write_model(tmp_path, model)
    for results in on_ranks(ranks, packed_steps, folder, strategy):
        padding, is_training, weight, counted, leak = results
        assert padding < 20
        assert is_training
        assert weight == counted
        assert leak.endswith("0.5 times as much as the first's; use data.pack=off")


@pytest.mark.bad_input("`data.pack=best_fit` with a model that mixes documents")
def test_a_model_that_leaks_or_has_too_few_positions_is_refused(tmp_path, monkeypatch):
    config = transformers.MambaConfig(
        vocab_size=tiny_hf.VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    mamba = (transformers.AutoModelForCausalLM, config)
    monkeypatch.setitem(tiny_hf.MODELS, "mamba", mamba)
    run = packed_run(World(), write_model(tmp_path / "mamba", "mamba"))
    (report,) = take_steps(run, 1)
    text = message_of(64, run.task.train_metrics, run, report)
    assert text.startswith("data.pack=best_fit needs a model that separates ")
    folder = write_model(tmp_path / "llama", "llama")
    text = message_of(64, packed_run, World(), folder, "--task.args.length 4096")
    assert text.startswith("task.args.length=4096 is more than the model's 2048 positions")


def attend_within(q, k, v, cu_seqlens_q, cu_seqlens_k):  # [tokens, heads, width]
    sizes = cu_seqlens_q.diff().tolist()
    parts = (part.transpose(0, 1).split(sizes, dim=1) for part in (q, k, v))
    options = {"is_causal": True, "enable_gqa": True}
    documents = zip(*parts, strict=True)
    outputs = [F.scaled_dot_product_attention(*document, **options) for document in documents]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def flash_attention(implementation):
    """torch's attention as the call of the flash-attention library that training uses."""
    return (None, attend_within, None, None, None), [lambda **options: {}] * 2


def test_flash_attention_has_the_logits_of_packed_rows(monkeypatch):
    utils = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(utils, "lazy_import_flash_attention", flash_attention)
    model = LLAMA_TASK.build_model()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])
    ids = torch.randint(VOCABULARY, (2, 8))
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    expected = model(**inputs_of(model, batch)).logits[:, :-1]
    model.config._attn_implementation = "flash_attention_2"
    packed = {**batch, "bounds": document_bounds(positions)}
    flash = model(**inputs_of(model, packed)).logits[:, :-1]
    # Another order of sums in float32.
    torch.testing.assert_close(flash, expected, rtol=1e-5, atol=1e-6)
