"""Packed documents see nothing of one another, packed equals unpacked, and a model that leaks is
caught by name.
"""

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from test_packing import Documents
from tiny import make_run, take_steps
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
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
        logits = self.logits(model, batch)[:, :-1].float()
        return F.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )


class OfTheGPT(Packed):
    """The shipped model and its loss, whole or in chunks."""

    def __init__(self, loss_chunk="off"):
        shape = {"context": 23, "width": 32, "layers": 2, "heads": 2, "vocabulary": VOCABULARY}
        self.task = CausalLM(DataConfig(pack="best_fit"), **shape, loss_chunk=loss_chunk)
        self.build_model, self.loss_sum = self.task.build_model, self.task.loss_sum


class OfLlama(Packed):
    """transformers' Llama, called as `inputs` says."""

    def __init__(self, attention="sdpa", **inputs):
        self.attention, self.inputs = attention, inputs

    def build_model(self):
        transformers = pytest.importorskip("transformers")
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**LLAMA, attn_implementation=self.attention)
        )

    def logits(self, model, batch):
        inputs = {
            name: value(batch) if callable(value) else value for name, value in self.inputs.items()
        }
        return model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], **inputs
        ).logits


class Mixing(nn.Module):
    """An embedding, a layer between tokens, a head; no attention."""

    def __init__(self, layer):
        super().__init__()
        self.embedding, self.layer, self.head = (
            nn.Embedding(VOCABULARY, 16),
            layer,
            nn.Linear(16, VOCABULARY),
        )

    def forward(self, ids):
        return self.head(
            self.layer(self.embedding(ids).transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)
        )


class OfALayer(Packed):
    def __init__(self, make_layer):
        self.make_layer = make_layer

    def build_model(self):
        return Mixing(self.make_layer())

    def logits(self, model, batch):
        return model(batch["input_ids"])


def reference_of(task):
    return Reference(load_config([], environ={}), torch.device("cpu"), task)


def findings_of(task):
    return inspect_task(reference_of(task))


def leak_of(task):
    (text,) = [finding.text for finding in findings_of(task) if finding.fails]
    return text


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(OfTheGPT(), id="gpt"),
        pytest.param(OfTheGPT(loss_chunk=8), id="gpt_in_chunks"),
        pytest.param(OfLlama(use_cache=False), id="llama"),
        pytest.param(OfLlama("eager", use_cache=False), id="llama_eager"),
    ],
)
def test_a_documents_loss_has_no_gradient_with_respect_to_another_documents_embeddings(task):
    findings = findings_of(task)
    assert not [finding.text for finding in findings if finding.fails]
    assert any(
        "no cross-document attention in packed rows: 8 rows, gradient exactly 0" in finding.text
        for finding in findings
    )


@pytest.mark.bad_input("a task whose packed documents leak through a cache, in `verify`")
def test_a_leak_through_a_cache_at_its_default_is_named():
    text = leak_of(OfLlama())
    assert text.startswith("packed documents leak in model.layers.0.self_attn (LlamaAttention): ")
    assert "use_cache at its default, true" in text
    assert "call it with use_cache=False" in text


@pytest.mark.bad_input("the same through an attention mask of ones")
def test_a_leak_through_an_attention_mask_of_ones_is_named():
    text = leak_of(
        OfLlama(use_cache=False, attention_mask=lambda batch: torch.ones_like(batch["input_ids"]))
    )
    assert text.startswith("packed documents leak in model.layers.0.self_attn (LlamaAttention): ")
    assert "an attention_mask of ones" in text
    assert "leave attention_mask out" in text


@pytest.mark.bad_input("the same through batch norm or a convolution")
@pytest.mark.parametrize(
    ("make_layer", "where"),
    [
        pytest.param(lambda: nn.BatchNorm1d(16), "layer (BatchNorm1d)", id="batch_norm"),
        pytest.param(lambda: nn.Conv1d(16, 16, 4, padding=3), "layer (Conv1d)", id="convolution"),
    ],
)
def test_a_layer_that_mixes_documents_is_named(make_layer, where):
    text = leak_of(OfALayer(make_layer))
    assert text.startswith(f"packed documents leak in {where}: ")
    assert "without regard to position_ids" in text


@pytest.mark.bad_input("a packed task in which `verify` finds no embedding of input_ids")
def test_a_model_without_an_embedding_of_the_tokens_is_not_passed_in_silence():
    class OneHot(nn.Sequential):
        def forward(self, ids):
            return super().forward(F.one_hot(ids, VOCABULARY).float())

    class Task(OfALayer):
        def build_model(self):
            return OneHot(nn.Linear(VOCABULARY, VOCABULARY))

    assert any(
        "not checked for leaks: no nn.Embedding" in finding.text
        for finding in findings_of(Task(None))
    )


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


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(OfTheGPT(), id="gpt"),
        pytest.param(OfTheGPT(loss_chunk=8), id="gpt_in_chunks"),
        pytest.param(OfLlama(use_cache=False), id="llama"),
    ],
)
def test_packed_documents_have_the_loss_and_the_gradients_of_each_alone(task):
    documents = Documents.random(40, 2, 24, VOCABULARY)
    packed = task.packing.rows(documents, "train")
    together = [task.collate([packed[index] for index in range(len(packed))])]
    single = Packing(24, "best_fit", "split")
    alone = [
        single.collate([{**one, "position_ids": torch.arange(len(one["input_ids"]))}])
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
    u = 2.0**-24
    bound = 2 * u * (tokens**0.5 + (10 * 256) ** 0.5)
    assert abs(loss - expected) <= bound * expected
    for name, gradient in gradients.items():
        # A gradient's terms have both signs; their size is that of the largest token's, so n of
        # them in place of one.
        assert (gradient - each[name]).abs().max() <= bound * tokens**0.5 * each[
            name
        ].abs().max(), name


def test_a_packed_document_that_is_changed_changes_no_other_documents_logits():
    task = OfTheGPT()
    model, batch = task.build_model(), task.collate([task.build_dataset("train")[0]])
    positions = batch["position_ids"][:, :-1]
    second = (positions == 0).cumsum(1)[0] > 1
    ids = batch["input_ids"][:, :-1]
    changed = torch.where(second, ids, ids ^ 1)
    a, b = (model(tokens, positions=positions) for tokens in (ids, changed))
    assert torch.equal(a[0, second], b[0, second])
    assert not torch.equal(a[0, ~second], b[0, ~second])


def test_positions_of_one_document_are_the_models_own():
    model = OfTheGPT().build_model()
    ids = torch.randint(VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(0))
    # The same sums: the mask only turns the causal kernel into one with a mask, which rounds in
    # another order.
    torch.testing.assert_close(
        model(ids), model(ids, positions=torch.arange(23).expand(2, -1)), rtol=1e-5, atol=1e-6
    )


# Hugging Face's task.


def write_model(folder, model):
    from tiny_hf import chats, make_model, make_tokenizer, write_rows

    make_model(folder, model)
    make_tokenizer(folder)
    write_rows(
        folder / "rows.jsonl", [{"text": row["messages"][1]["content"]} for row in chats(200)]
    )
    return folder


def packed_run(world, folder, words=""):
    words = (
        f"--task.target dist_amp.tasks.hf_causal_lm:HFCausalLM --task.args.model {folder} "
        f"--task.args.length 32 --data.path {folder}/rows.jsonl --data.pack best_fit "
        f"--run.dir {folder}/run --train.steps 4 --train.micro_batch_size 2 {words}"
    )
    return make_run(world, None, *words.split())


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
def test_a_hugging_face_model_that_tells_documents_apart_trains_on_packed_rows(tmp_path, model):
    run = packed_run(World(), write_model(tmp_path, model))
    (report,) = take_steps(run, 1)
    assert train_metrics(run, report)["train/padding_pct"] < 20
    assert float(report.weight) == float((run.data.last_step[0][0]["labels"][:, 1:] != -100).sum())


@pytest.mark.bad_input("`data.pack=best_fit` with a model that attends across packed documents")
def test_a_model_that_leaks_is_refused_at_the_first_log_step(tmp_path, monkeypatch):
    import tiny_hf
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(
        vocab_size=tiny_hf.VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    monkeypatch.setitem(tiny_hf.MODELS, "mamba", (AutoModelForCausalLM, config))
    run = packed_run(World(), write_model(tmp_path, "mamba"))
    (report,) = take_steps(run, 1)
    with pytest.raises(
        ConfigError, match=r"data.pack=best_fit needs a model that separates .* use data.pack=off$"
    ):
        run.task.train_metrics(run, report)


def apart_when_sharded(world, folder):
    run = packed_run(world, folder, "--parallel.strategy fsdp")
    report = take_steps(run, 1)[0]
    before = run.parallel.module.training
    values = train_metrics(run, report)
    take_steps(run, 1)
    return before and run.parallel.module.training and "train/padding_pct" in values


@pytest.mark.slow
def test_sharded_models_are_checked_too_and_train_on(tmp_path):
    assert all(on_ranks(2, apart_when_sharded, write_model(tmp_path, "llama"), timeout_seconds=60))


@pytest.mark.bad_input("`task.args.length` above the model's max_position_embeddings")
def test_rows_longer_than_the_models_positions_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task.args.length=4096 is more than the model's 2048 positions"
    ):
        packed_run(World(), write_model(tmp_path, "llama"), "--task.args.length 4096")
