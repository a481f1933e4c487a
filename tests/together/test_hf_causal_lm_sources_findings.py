"""What test_sources_findings.py tests, with hf_causal_lm."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from test_sources_findings import own_cache  # noqa: F401

NAN = float("nan")


class OfOthers:
    """A model whose attention is not ours; its logits are all `value`."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def __init__(self, value=0.0):
        self.value = value

    def __call__(self, input_ids, position_ids, use_cache):
        return SimpleNamespace(logits=torch.full((*input_ids.shape, 7), self.value))


def packed_run(gather):
    """What the check of packed documents needs of a run."""
    return SimpleNamespace(
        world=SimpleNamespace(gather=gather),
        data=SimpleNamespace(last_step=[({"input_ids": torch.zeros(1, 8)}, (0,))]),
        parallel=SimpleNamespace(module=OfOthers()),
        precision=SimpleNamespace(autocast=nullcontext),
        evaluating=nullcontext,
    )


@pytest.mark.parametrize(("shares", "leak"), [([0.0, 0.0], False), ([0.0, 0.5], True)])
def test_whether_documents_leak_is_decided_by_what_all_ranks_found(shares, leak, monkeypatch):
    pytest.importorskip("transformers")
    from dist_amp.tasks import hf_causal_lm

    run = packed_run(lambda share: shares)
    monkeypatch.setattr(hf_causal_lm, "leaked_share", lambda model, ids, how: shares[0])
    if leak:
        fragment = message_of(64, hf_causal_lm.check_documents_are_apart, run, "auto")
        assert fragment.endswith("0.5 as much as its own; use data.pack=off")
    else:
        hf_causal_lm.check_documents_are_apart(run, "auto")


@pytest.mark.parametrize("value", [0.0, NAN])
def test_logits_that_do_not_tell_whether_documents_leak_are_no_leak(value):
    pytest.importorskip("transformers")
    from dist_amp.tasks.hf_causal_lm import leaked_share

    assert leaked_share(OfOthers(value), torch.arange(8)[None]) == 0


class FlashAttention:
    """torch's attention with the two calls of the flash-attention library that training uses."""

    @staticmethod
    def attend(q, k, v):  # [B, T, heads, width]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    def attend_within(self, q, k, v, cu_seqlens_q, cu_seqlens_k):  # [tokens, heads, width]
        sizes = cu_seqlens_q.diff().tolist()
        documents = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self.attend(*(x[None] for x in one))[0] for one in documents])

    def functions(self, implementation):
        no_options = lambda **options: {}  # noqa: E731
        return (self.attend, self.attend_within, None, None, None), (no_options, no_options)


def flash_model(monkeypatch):
    transformers = pytest.importorskip("transformers")
    utils = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(utils, "lazy_import_flash_attention", FlashAttention().functions)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model.config._attn_implementation = "flash_attention_2"
    return model


def test_the_loss_of_packed_rows_is_the_same_with_flash_attention(monkeypatch):
    from dist_amp.tasks.huggingface import inputs_of
    from dist_amp.tasks.packed_attention import document_bounds

    model = flash_model(monkeypatch)
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])
    input_ids = torch.randint(64, (2, 8))
    batch = {"input_ids": input_ids, "labels": input_ids, "position_ids": positions}
    packed = {**batch, "bounds": document_bounds(positions)}
    flash = model(**inputs_of(model, packed)).logits[:, :-1].flatten(0, 1)
    model.config._attn_implementation = "sdpa"
    # Another order of sums in float32.
    expected = model(**inputs_of(model, batch)).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(flash, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
def test_flash_attention_keeps_documents_apart_in_batches_of_any_size(rows, monkeypatch):
    from dist_amp.tasks.hf_causal_lm import LEAK, leaked_share

    model = flash_model(monkeypatch)
    input_ids = torch.randint(64, (rows, 16))
    assert leaked_share(model, input_ids) <= LEAK


def test_a_leak_that_only_batches_of_several_rows_have_is_found(monkeypatch):
    from dist_amp.tasks import hf_causal_lm

    model = flash_model(monkeypatch)
    monkeypatch.setattr(hf_causal_lm, "document_bounds", lambda positions: None)
    assert hf_causal_lm.leaked_share(model, torch.randint(64, (2, 16))) > 0.01


def test_rounding_that_float32_does_not_have_is_no_leak(monkeypatch):
    pytest.importorskip("transformers")
    from dist_amp.tasks import hf_causal_lm

    shares = [0.5, 0.0]  # in bf16, then in float32
    run = packed_run(lambda numbers: [numbers])
    monkeypatch.setattr(hf_causal_lm, "leaked_share", lambda model, ids, how: shares.pop(0))
    hf_causal_lm.check_documents_are_apart(run, "auto")
    assert not shares
