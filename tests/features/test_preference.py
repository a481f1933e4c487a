"""DPO: the loss and its gradient are a plain reference's, and pairs train on every strategy."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from ranks import on_ranks
from tiny import make_run, take_steps
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
from tiny_hf import (
    LLAMA,
    QUICK,
    VOCABULARY,
    chats,
    make_model,
    make_tokenizer,
    trained_and_resumed,
    write_rows,
)
from transformers import AutoModelForCausalLM, LlamaConfig

from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig
from dist_amp.tasks.preference import DPO
from dist_amp.world import World

CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """rows: of each matrix product with the vocabulary's width."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and out.shape[1] == VOCABULARY:
            self.rows.append(len(out))
        return out


def pairs(count=24, chats=False):
    """Prompts of different lengths, of which the answer in small letters is preferred."""
    rows = []
    for number in range(count):
        row = {"prompt": f"say {number}: ", "chosen": "ab" * (1 + number % 3), "rejected": "XY"}
        if chats:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
            for name in ("chosen", "rejected"):
                row[name] = [{"role": "assistant", "content": row[name]}]
        rows.append(row)
    return rows


def dpo(folder, rows, **options):
    data = DataConfig(path=str(write_rows(folder / "rows.jsonl", rows)), validation_split=0.25)
    return DPO(data, str(folder), **options)


@pytest.fixture
def folder(tmp_path):
    make_tokenizer(make_model(tmp_path, "llama"))
    return tmp_path


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
def test_the_loss_and_its_gradient_are_those_of_a_plain_reference(rank, folder):
    task = dpo(folder, pairs(), beta=0.3, lora_rank=rank)
    rows = pairs()[:4]
    model = moved_off(build_whole(task, CPU))
    dataset = task.build_dataset("train")
    dataset.rows = rows
    batch = task.collate([dataset[number] for number in range(4)])
    trained = [p for p in model.parameters() if p.requires_grad]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}])
def test_training_begins_at_the_reference_where_every_pair_costs_log_2(options, folder):
    task = dpo(folder, pairs(chats=True), **options)
    dataset = task.build_dataset("train")
    batch = task.collate([dataset[number] for number in range(4)])
    model = build_whole(task, CPU)
    assert task.loss_sum(model, batch).item() == pytest.approx(4 * math.log(2), rel=1e-6)
    assert task.metrics(model, batch)["margin"] == 0


@pytest.mark.parametrize("rank", [0, 2])
def test_in_training_the_reference_is_read_without_dropout_and_the_policy_with_it(rank, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    run = make_run(World(), dpo(folder, pairs(), lora_rank=rank), *QUICK)
    (batch,) = next(run.data)
    names = ("input_ids", "attention_mask", "labels")
    one, two = [run.model(**{name: batch[name] for name in names}) for _ in range(2)]
    assert torch.equal(one[1], two[1])
    assert not torch.equal(one[0], two[0])
    with run.evaluating():
        torch.testing.assert_close(run.model(**{name: batch[name] for name in names})[1], one[1])
    assert run.model.policy.training


def trained(world, folder, strategy, options):
    task = dpo(folder, pairs(), beta=0.5, pad_to_multiple_of=1, **options)
    return trained_and_resumed(world, task, folder, strategy, 0.1)


@pytest.mark.parametrize(("options", "strategy"), [({}, "ddp"), ({"lora_rank": 2}, "fsdp")])
def test_two_ranks_learn_what_one_does_and_resume_bit_for_bit(options, strategy, folder):
    ((alone, values),) = on_ranks(1, trained, folder, "single", options)
    assert values.keys() == {"loss", "accuracy", "margin"}
    if not options:
        assert values["loss"] < 0.9 * math.log(2)
        assert values["margin"] > 0
        assert values["accuracy"] == 1
    for parameters, evaluation in on_ranks(2, trained, folder, strategy, options):
        # Four steps of 0.1 times gradients of some units, in another order: 2^-24 of each.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=2e-6)
        assert evaluation == pytest.approx(values, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("rank", [0, 2])
def test_no_more_logits_exist_than_a_chunks_and_the_reference_makes_them_once(rank, folder):
    task = dpo(folder, pairs(), loss_chunk=50, lora_rank=rank)
    run = make_run(None, task, *QUICK)
    with Products() as products:
        take_steps(run, 1)
    tokens = run.data.last_step[0][0]["labels"].numel()
    assert max(products.rows) == 50
    # The reference's, the policy's, and those again for the policy's gradient.
    assert sum(products.rows) == 3 * tokens


def test_a_reference_of_its_own_is_used_also_with_adapters(folder, tmp_path):
    make_tokenizer(make_model(tmp_path / "other", "llama_tied"))
    task = dpo(folder, pairs(), reference=str(tmp_path / "other"), lora_rank=2)
    dataset = task.build_dataset("train")
    model = build_whole(task, CPU)
    assert task.metrics(model, task.collate([dataset[0], dataset[1]]))["margin"] != 0


# ---- bad inputs ----

TURN = [{"role": "user", "content": "a"}]
ANSWER = [{"role": "assistant", "content": "b"}]
SILENT = [{"role": "assistant", "content": ""}]


@pytest.mark.bad_input(
    "a preference whose chosen and rejected answers are equal, or equal when cut"
)
@pytest.mark.bad_input("a preference with an empty answer, as text and as messages")
@pytest.mark.bad_input("a preference with a prompt longer than `task.args.length`")
@pytest.mark.bad_input(
    "a preference with a prompt as text and answers as messages, or a null answer"
)
@pytest.mark.bad_input("preferences as messages with a tokenizer without a chat template")
@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected", "message"),
    [
        ("a", "b", "b", "chosen and rejected are equal within"),
        ("a", "b" * 9, "b" * 8, "equal within task.args.length=8"),
        ("a", "b", " ", "the answer rejected is empty; write one"),
        (TURN, SILENT, ANSWER, "the answer chosen is empty"),
        ("abcdefgh", "b", "c", "ends before the answer chosen, of"),
        ("a", ANSWER, ANSWER, "the column chosen holds list, not text"),
        ("a", "b", None, "the column rejected holds NoneType"),
        (TURN, [{"role": "a"}], ANSWER, "chosen holds ["),
        (TURN, ANSWER, SILENT, "the tokenizer has no chat template; use a chat model, or"),
    ],
)
def test_a_pair_of_which_nothing_can_be_learned_is_refused(
    prompt, chosen, rejected, message, folder
):
    if "template" in message:
        (folder / "chat_template.jinja").unlink()
    dataset = dpo(folder, pairs(), length=8).build_dataset("train")
    dataset.rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}]
    assert message in message_of(65, dataset.__getitem__, 0)


@pytest.mark.bad_input("preferences without a column prompt, chosen or rejected")
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"chosen": "a", "rejected": "b"}], "no column prompt; the columns are chosen, rejected"),
        (chats(8), "nor prompt or chosen or rejected; the columns are"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(rows, message, folder):
    assert message in message_of(65, dpo(folder, rows * 8).build_dataset, "train")


@pytest.mark.bad_input("a reference model with another vocabulary")
def test_a_reference_of_another_vocabulary_is_refused(folder, tmp_path):
    other = AutoModelForCausalLM.from_config(LlamaConfig(**{**LLAMA, "vocab_size": 300}))
    other.save_pretrained(tmp_path / "other")
    make_tokenizer(tmp_path / "other")
    task = dpo(folder, pairs(), reference=str(tmp_path / "other"))
    text = message_of(64, task.build_model)
    assert "other has a vocabulary of 300 tokens and the model 260" in text
