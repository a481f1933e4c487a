"""The loss of a large vocabulary, whose logits exist a chunk of tokens at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")
from peft import LoraConfig, get_peft_model
from tiny_hf import LLAMA, VOCABULARY
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MambaConfig

from dist_amp.tasks import loss_head
from dist_amp.tasks.huggingface import make_loss_head, next_token_losses
from dist_amp.tasks.loss_head import LossHead

TOKENS, WIDTH, CHUNK = 64, 32, 20
both_reductions = pytest.mark.parametrize("reduction", ["sum", "none"])


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, TOKENS // 4, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (4, TOKENS // 4), generator=generator)
    targets[0, 3] = -100
    head = LossHead(WIDTH, VOCABULARY, bias=False)
    nn.init.normal_(head.weight, std=0.2, generator=generator)
    return head.to(dtype), x, targets


def loss_and_gradients(head, x, targets, chunk, scale=1.0, reduction="sum"):
    """none: of a loss whose gradient by each token's is another, some negative and one 0."""
    head.chunk = chunk
    loss = head(x, targets, reduction)
    if reduction == "none":
        assert loss.shape == (TOKENS,)
        loss = (loss.view(targets.shape).sum(1) * torch.tensor([1.0, -2.0, 0.0, 0.3])).sum()
    return [loss, *torch.autograd.grad(loss * scale, [x, head.weight])]


def worst(values, truth):
    pairs = zip(values, truth, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, CHUNK, TOKENS - 1])
@both_reductions
def test_loss_and_gradients_are_those_of_all_logits_at_once(reduction, chunk, autocast):
    head, x, targets = inputs()
    truth = loss_and_gradients(*inputs(torch.float64), "off", reduction=reduction)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        plain = loss_and_gradients(head, x, targets, "off", reduction=reduction)
        values = loss_and_gradients(head, x, targets, chunk, reduction=reduction)
    assert {value.dtype for value in values} == {torch.float32}
    # As near to float64 as the whole logits are; in float32 both are some roundings of 2^-24 away.
    assert worst(values, truth) <= max(1.5 * worst(plain, truth), 2e-6)


@both_reductions
def test_float16_keeps_gradients_that_are_too_small_for_it_before_the_loss_scale(reduction):
    head, x, targets = inputs()
    with torch.no_grad():
        head.weight.mul_(40)  # most probabilities are below 6e-8
    with torch.autocast("cpu", torch.float16):
        values = loss_and_gradients(head, x, targets, CHUNK, 2.0**16, reduction)
    x = x.double().detach().requires_grad_()
    truth = loss_and_gradients(head.double(), x, targets, "off", reduction=reduction)
    assert worst([values[1] / 2**16], [truth[1]]) < 0.02  # float16 rounds the logits by 2^-11 of 90


class Largest(TorchDispatchMode):
    """The most rows of a tensor with a vocabulary at its end."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


@pytest.mark.parametrize("reduction", ["sum", "none", "hits"])
def test_auto_holds_as_many_logits_as_its_bytes_allow(reduction, monkeypatch):
    head, x, targets = inputs()
    monkeypatch.setattr(loss_head, "AUTO_BYTES", 4 * VOCABULARY * 40)
    with Largest() as largest:
        loss = head(x, targets, reduction)
        if reduction != "hits":
            loss.sum().backward()
    assert largest.rows == 40


def test_each_targets_loss_and_hit_have_no_gradient_and_add_up():
    head, x, targets = inputs()
    head.chunk = CHUNK
    losses, hits = head(x, targets, "hits")
    assert not losses.requires_grad
    torch.testing.assert_close(losses.sum(), head(x, targets).detach())
    expected = (head(x).argmax(-1) == targets).flatten().float()
    assert hits.tolist() == expected.tolist()
    assert losses[3] == 0  # -100
    torch.testing.assert_close(losses, head(x, targets, "none").detach())


@pytest.mark.bad_input("a second derivative of a loss in chunks")
@both_reductions
def test_a_frozen_head_gets_no_gradient_evaluation_none_and_a_second_one_is_refused(reduction):
    head, x, targets = inputs()
    expected = loss_and_gradients(head, x, targets, "off")[1]
    head.chunk = CHUNK
    with pytest.raises(RuntimeError, match="no second derivative; use --task.args.loss_chunk off"):
        torch.autograd.grad(head(x, targets, reduction).sum(), x, create_graph=True)
    head.weight.requires_grad_(False)
    head(x, targets, reduction).sum().backward()
    assert head.weight.grad is None
    torch.testing.assert_close(x.grad, expected)
    with torch.no_grad():
        assert not head(x, targets, reduction).requires_grad


@pytest.mark.bad_input("`task.args.loss_chunk` of a model that changes its logits")
def test_a_model_that_changes_its_logits_keeps_its_head_and_takes_no_chunk():
    model = AutoModelForCausalLM.from_config(Gemma2Config(**LLAMA, head_dim=8))
    text = message_of(64, make_loss_head, model, 64)
    assert text.startswith("task.args.loss_chunk=64 needs a model whose logits")
    make_loss_head(model, "auto")
    assert type(model.get_output_embeddings()) is nn.Linear


SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
MAMBA = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)


@pytest.mark.parametrize(
    ("config", "options", "is_chunked"),
    [
        (LlamaConfig(**LLAMA), {"target_modules": ["lm_head"]}, False),
        (LlamaConfig(**LLAMA), SAVED, False),
        (LlamaConfig(**LLAMA), {"target_modules": ["q_proj"]}, True),
        (MAMBA, {}, True),
    ],
)
def test_the_losses_are_those_of_the_logits_and_a_head_that_peft_trains_keeps_them_all(
    config, options, is_chunked
):
    model = AutoModelForCausalLM.from_config(config)
    if options:
        model = get_peft_model(model, LoraConfig(**options))
    ids = torch.arange(12).view(2, 6)
    logits = copy.deepcopy(model)(input_ids=ids).logits
    make_loss_head(model, "auto")
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=0, atol=0)
    assert isinstance(model.get_output_embeddings(), LossHead) == is_chunked
    losses, _ = next_token_losses(model, {"input_ids": ids}, ids, "none")
    targets = ids[:, 1:].flatten()
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none")
    torch.testing.assert_close(losses.view(2, 6)[:, :-1].flatten(), expected)
    assert losses.requires_grad
