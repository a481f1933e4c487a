"""What test_sources_findings.py tests, with other features."""

import torch
from test_hf_causal_lm_sources_findings import flash_model
from test_sources_findings import own_cache  # noqa: F401


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
