"""examples/preference.py: the loss and its gradient are a plain reference's, on every strategy."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from messages import message_of
from ranks import on_ranks
from tiny import make_run, save, take_steps

pytest.importorskip("transformers")
from peft import AutoPeftModelForCausalLM
from tiny_hf import (
    QUICK,
    chats,
    make_model,
    make_tokenizer,
    trained_and_resumed,
    write_rows,
)
from transformers import AutoModelForCausalLM

from dist_amp.commands import export
from dist_amp.scaling.meta import build_whole
from dist_amp.settings import DataConfig
from dist_amp.step import evaluate
from dist_amp.tasks.loss_head import LossHead
from dist_amp.verify import __main__ as verify
from dist_amp.verify.cells import capture
from dist_amp.world import World
from examples.preference import DPO

CPU = torch.device("cpu")
TARGET = f"{ROOT}/examples/preference.py:DPO"


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


def test_a_reference_of_its_own_is_used_also_with_adapters(folder, tmp_path):
    make_tokenizer(make_model(tmp_path / "other", "llama_tied"))
    task = dpo(folder, pairs(), reference=str(tmp_path / "other"), lora_rank=2)
    dataset = task.build_dataset("train")
    model = build_whole(task, CPU)
    assert task.metrics(model, task.collate([dataset[0], dataset[1]]))["margin"] != 0


def second_gradients(world, folder, chunk, options, words):
    """Of the second step, when the policy is no longer the reference; and the evaluation."""
    task = dpo(folder, pairs(), beta=0.5, loss_chunk=chunk, pad_to_multiple_of=1, **options)
    words = ["--optim.lr", 0.05, "--optim.name", "sgd", "--train.accumulation_steps", 2, *words]
    run = make_run(world, task, *QUICK, "--eval.batches", 1, *words)
    heads = [part for part in run.parallel.module.modules() if isinstance(part, LossHead)]
    assert bool(heads) == (chunk != "off")
    states = capture(run)
    take_steps(run, 2)
    return [state.gradients for state in states], evaluate(run)  # on rank 0 alone


RECOMPUTED = "--parallel.strategy fsdp --parallel.activation_checkpointing full"
COMPILED = " --compile.blocks true --compile.mode aot_eager"


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({}, "llama_tied", RECOMPUTED),  # the head is in the root's unit
        ({"lora_rank": 2}, "llama", "--parallel.strategy fsdp"),  # a frozen head
        pytest.param({}, "llama", RECOMPUTED + COMPILED, marks=pytest.mark.slow),
    ],
)
def test_the_loss_in_chunks_has_the_gradients_of_all_logits_at_once(options, name, words, tmp_path):
    make_tokenizer(make_model(tmp_path, name))
    plain, chunked = (
        on_ranks(2, second_gradients, tmp_path, chunk, options, words.split())[0]
        for chunk in ("off", 5)
    )
    for key, true in plain[0][-1].items():
        # Sums in another order, of two steps: some roundings of 2^-24 of the largest.
        torch.testing.assert_close(chunked[0][-1][key], true, rtol=0, atol=4e-6 * true.abs().max())
    assert chunked[1] == pytest.approx(plain[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("rank", "merge"), [(0, ""), (2, ""), (2, "--merge")])
def test_an_export_is_the_policy_alone(rank, merge, folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = "--train.steps 4 --optim.lr 0.01 --run.dir run --data.path rows.jsonl"
    words += f" --task.target {TARGET} --task.args.model {folder} --task.args.lora_rank {rank}"
    write_rows(folder / "rows.jsonl", pairs())
    run = make_run(None, None, *QUICK, *words.split())
    take_steps(run, 2)
    save(run)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = run.parallel.module.policy(input_ids=ids).logits
    assert export.main(f"run --out out --format hf {merge} --task.target {TARGET}".split()) == 0
    kind = AutoPeftModelForCausalLM if rank and not merge else AutoModelForCausalLM
    model = kind.from_pretrained("out")
    with torch.no_grad():
        # float32 rounds logits of about 1 by 2^-24, in several products.
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_verify_passes_on_one_and_two_ranks(rank, folder, capfd):
    write_rows(folder / "rows.jsonl", pairs(300))
    words = f"--task.target {TARGET} --task.args.model {folder} --data.path {folder}/rows.jsonl"
    words += f" --world_sizes 1,2 --precisions fp32 --task.args.lora_rank {rank}"
    status = verify.main(words.split())
    assert status == 0, capfd.readouterr().out


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
        ("a", "b", " ", "nothing of the answer rejected is left"),
        (TURN, SILENT, ANSWER, "nothing of the answer chosen is left"),
        ("abcdefgh", "b", "c", "nothing of the answer chosen is left within task.args.length=8"),
        ("a", ANSWER, ANSWER, "the column completion holds list, not text"),
        ("a", "b", None, "the column completion holds NoneType"),
        (TURN, [{"role": "a"}], ANSWER, "completion holds ["),
        (TURN, ANSWER, SILENT, "the tokenizer has no template; use texts"),
    ],
)
def test_a_pair_of_which_nothing_can_be_learned_is_refused(
    prompt, chosen, rejected, message, folder
):
    if "no template" in message:
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
