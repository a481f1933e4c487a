"""Attention within packed documents: torch's kernel for them has the values of the mask, and
transformers' models read nothing of the device. The kernel runs on GPUs; here by a CPU's.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from optimizer_runs import Counter
from tiny import make_run, take_steps
from torch.nn.attention import varlen

pytest.importorskip("transformers")
import tiny_hf
from test_packing_leak import OfTheGPT
from transformers import AutoConfig, AutoModelForCausalLM

from dist_amp.errors import ConfigError
from dist_amp.tasks import hf_causal_lm, huggingface, packed_attention
from dist_amp.tasks.huggingface import PLAIN, inputs_of
from dist_amp.tasks.packed_attention import Documents, attend, document_bounds, document_mask
from dist_amp.world import World

KERNEL = "torch_attn._varlen_attn.default"
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0], [*range(8)]])
BOUNDS = document_bounds(POSITIONS)


FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def documents_of(bounds, *parts):
    """Each one's part [1, heads, tokens, width] of [tokens, heads, width]."""
    sizes = bounds.diff().tolist()
    split = (part.transpose(0, 1)[None].split(sizes, dim=2) for part in parts)
    return [document for document in zip(*split, strict=True) if document[0].numel()]


def joined(documents):
    return torch.cat(documents, dim=2)[0].transpose(0, 1).contiguous()


def forward_kernel(query, key, value, bounds, keys_bounds, most, keys_most, causal, scale, *_):
    assert causal
    assert most >= bounds.diff().max()
    assert bounds.dtype is torch.int32
    documents = documents_of(bounds, query, key, value)
    outputs = [FLASH(*document, 0.0, causal, scale=scale)[0] for document in documents]
    lse = query.new_zeros((query.shape[1], len(query)), dtype=torch.float32)
    return joined(outputs), lse, torch.zeros(2, dtype=torch.uint64)


def backward_kernel(gradient, query, key, value, out, lse, bounds, *rest):
    scale = rest[5]
    gradients = []
    for of_output, *inputs in documents_of(bounds, gradient, query, key, value):
        outputs = FLASH(*inputs, 0.0, True, scale=scale)
        gradients.append(FLASH_BACKWARD(of_output, *inputs, *outputs, 0.0, True, scale=scale))
    return tuple(joined(part) for part in zip(*gradients, strict=True))


if torch.__version__ < "2.13":
    pytest.skip("this torch has no such kernel", allow_module_level=True)
varlen._varlen_attn.register_kernel("cpu")(forward_kernel)
varlen._varlen_attn_backward.register_kernel("cpu")(backward_kernel)


@pytest.fixture
def kernel(monkeypatch):
    """The kernel runs here, in float32 and float64 too."""
    monkeypatch.setattr(packed_attention, "kernel_runs_on", lambda device: True)
    monkeypatch.setattr(packed_attention, "DTYPES", (torch.float32, torch.float64, torch.bfloat16))


def drawn(heads=4, of_keys=4, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, number, 8, width) for number in (heads, of_keys, of_keys))
    parts = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    return [part.requires_grad_() for part in parts]


VARLEN = Documents(POSITIONS, BOUNDS, mask=None, required=True)


@pytest.mark.parametrize(("of_keys", "scale"), [(4, None), (2, 0.3)])
def test_the_kernel_gets_documents_whose_values_and_gradients_are_the_masks(kernel, of_keys, scale):
    inputs = drawn(of_keys=of_keys, dtype=torch.float64)
    with Counter(KERNEL) as counter:
        outputs = [attend(inputs, VARLEN, scale)[0]]
        mask = document_mask(POSITIONS)
        options = {"scale": scale, "enable_gqa": True}
        outputs.append(F.scaled_dot_product_attention(*inputs, mask, **options))
    assert counter.count == 1
    results = [[out, *torch.autograd.grad(out.square().sum(), inputs)] for out in outputs]
    # Sums of at most 8 terms in another order: float64 rounds by 1e-16.
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "width", "dropout"),
    [
        (torch.float16, 8, 0.0),
        (torch.float32, 12, 0.0),
        (torch.float32, 264, 0.0),
        (torch.float32, 8, 0.1),
    ],
)
def test_what_the_kernel_does_not_take_gets_a_mask_unless_it_is_required(
    kernel, dtype, width, dropout
):
    parts = drawn(width=width, dtype=dtype)
    out, mask = attend(parts, VARLEN._replace(required=False), dropout=dropout)
    assert out is None
    assert torch.equal(mask, document_mask(POSITIONS))
    with pytest.raises(ConfigError, match="no dropout") if dropout else nullcontext():
        assert attend(parts, VARLEN, dropout=dropout)[1] is None


SELECTIVE = "--parallel.activation_checkpointing selective"
COMPILED = "--compile.blocks true --compile.mode aot_eager"


@pytest.mark.parametrize("words", ["", SELECTIVE, COMPILED], ids=["plain", "selective", "compiled"])
def test_steps_with_the_kernel_are_those_with_the_mask(kernel, words, capsys):
    losses = []
    for how in ("varlen", "mask"):
        run = make_run(
            World(), OfTheGPT(packed_attention=how), "--use_amp", "false", *words.split()
        )
        with Counter(KERNEL) as counter:
            losses.append([float(loss) for report in take_steps(run, 2) for loss in report.losses])
        if words == SELECTIVE:  # nothing that the kernel computed is computed again
            assert counter.count == (4 if how == "varlen" else 0)  # two steps of two layers
    assert "is not one graph" not in capsys.readouterr().err
    # A sum of some 100 rounded losses, of two steps of an optimizer.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


SIZES = {**tiny_hf.TRANSFORMER, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 64, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
FILLED = (torch.arange(8) < torch.tensor([[8], [3], [5]])).long()
PADDED = {"input_ids": IDS, "attention_mask": FILLED}
PACKED = {"input_ids": IDS, "position_ids": POSITIONS, "bounds": BOUNDS}
CUT = {"input_ids": IDS}


def model_of(kind, folder):
    """As the tasks build it, without GPT-2's dropout."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {}
    AutoConfig.for_model(kind, **SIZES, **sizes).save_pretrained(folder)
    return huggingface.build(AutoModelForCausalLM, folder).eval()


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_model_reads_nothing_and_its_logits_are_those_of_transformers(
    kind, tmp_path, monkeypatch
):
    model = model_of(kind, tmp_path)
    for batch in (PADDED, PACKED, CUT):
        with Counter("_local_scalar_dense") as counter:
            logits = model(**inputs_of(model, batch)).logits
        assert counter.count == 0
        inputs = {name: value for name, value in batch.items() if name != "bounds"}
        with monkeypatch.context() as patch:
            patch.setattr(model.config, "_attn_implementation", "sdpa")
            expected = model(**inputs, use_cache=False).logits
        filled = batch.get("attention_mask", torch.ones_like(IDS)).bool()
        # The same kernel of a CPU, with a mask or without: logits of 0.1 that float32 rounds by
        # 1e-8.
        torch.testing.assert_close(logits[filled], expected[filled], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_model_takes_the_kernel(kind, kernel, tmp_path):
    model = model_of(kind, tmp_path)
    results = []
    for how in ("varlen", "mask"):
        with Counter(KERNEL) as counter:
            logits = model(**inputs_of(model, PACKED, how)).logits
        assert counter.count == (2 if how == "varlen" else 0)  # layers
        loss = logits.square().sum()
        results.append([logits, *torch.autograd.grad(loss, list(model.parameters()))])
    # float32, two layers and their norms
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert hf_causal_lm.leaked_share(model, IDS, "varlen") <= hf_causal_lm.LEAK
