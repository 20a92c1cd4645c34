import math

import pytest
import torch
from einops import rearrange
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe import optim


def dense(q, k, scale, causal, segment_ids):
    """All scores at once."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    keep = (keep.tril() if causal else keep).expand(q.shape[0], 1, -1, -1)
    if segment_ids is not None:
        keep = keep & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return torch.where(keep, scores, -math.inf).amax(dim=(0, 2, 3))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_blockwise_maxima_equal_the_dense_ones(data):
    draw = data.draw
    batch, kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, head_dim, block = draw(st.integers(1, 40)), draw(st.integers(1, 9)), draw(st.integers(1, 45))
    causal, segmented = draw(st.booleans()), draw(st.booleans())
    scale = draw(st.sampled_from([None, 0.3, -0.7]))
    kv_length = length if causal or segmented else draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    q = torch.randn(batch, kv * group, length, head_dim, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, kv, kv_length, head_dim, generator=generator, dtype=torch.float64)
    # Quarters: products and sums are exact in float32, so equality is bit for bit.
    q, k = (q * 4).round().float() / 4, (k * 4).round().float() / 4
    ids = torch.randint(0, 3, (batch, length), generator=generator).sort(dim=1).values if segmented else None
    ours = optim.max_attention_logits(q, k, scale=scale, causal=causal, segment_ids=ids, block=block)
    expected = dense(q, k, 1 / math.sqrt(head_dim) if scale is None else scale, causal, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    if scale is None and head_dim in (1, 4):
        assert torch.equal(ours, expected)


def test_score_matrix_is_never_materialised(monkeypatch):
    sizes = []
    where = torch.Tensor.amax

    def amax(self, *args, **kwargs):
        sizes.append(self.numel())
        return where(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "amax", amax)
    q, k = torch.randn(1, 2, 256, 4), torch.randn(1, 1, 256, 4)
    optim.max_attention_logits(q, k, block=32)
    assert max(sizes) == 2 * 32 * 32 and len(sizes) == 8 * 9 // 2  # blocks above the diagonal are skipped


def test_logits_carry_no_gradient_and_compose_with_transforms():
    q, k = torch.randn(2, 4, 9, 5), torch.randn(2, 2, 9, 5)
    slope = torch.func.grad(lambda q: (q**2).sum() + optim.max_attention_logits(q, k).sum())(q)
    torch.testing.assert_close(slope, 2 * q)
    batched = torch.func.vmap(lambda q: optim.max_attention_logits(q[None], k[:1], block=4))(q)
    torch.testing.assert_close(batched[1], optim.max_attention_logits(q[1:], k[:1]))


def logits_of(x, wq, wk, num_heads, num_kv_heads):
    q = rearrange(x @ wq, "b s (h d) -> b h s d", h=num_heads)
    k = rearrange(x @ wk, "b s (h d) -> b h s d", h=num_kv_heads)
    return optim.max_attention_logits(q, k, block=8), q, k


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_every_head_is_brought_to_tau_and_the_others_are_left(num_heads, num_kv_heads):
    torch.manual_seed(0)
    x = torch.randn(2, 20, 16)
    wq, wk = torch.randn(16, num_heads * 4), torch.randn(16, num_kv_heads * 4)
    wq[:, :4] *= 0.01  # a head that needs no clipping, in a group where others do
    before, _, _ = logits_of(x, wq, wk, num_heads, num_kv_heads)
    tau = float(before.max()) / 2
    new_q, new_k = optim.qk_clip(tau)({"l": wq}, {"l": wk}, {"l": before})
    after, _, _ = logits_of(x, new_q["l"], new_k["l"], num_heads, num_kv_heads)
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-5, atol=1e-6)
    assert float(before[0]) < tau < float(before.max())
    if num_heads == num_kv_heads:
        # Query and key share the shrinking: a square root each (Kimi K2).
        gamma = torch.clamp(tau / before, max=1).sqrt().repeat_interleave(4)
        torch.testing.assert_close(new_q["l"], wq * gamma)
        torch.testing.assert_close(new_k["l"], wk * gamma)


def test_below_tau_nothing_changes_and_inputs_never_do():
    wq, wk, logits = torch.randn(8, 12), torch.randn(8, 4), torch.tensor([1.0, -math.inf, 5.0])
    versions = wq._version, wk._version
    new_q, new_k = optim.qk_clip(5.0)(wq, wk, logits)
    assert torch.equal(new_q, wq) and torch.equal(new_k, wk)
    optim.qk_clip(0.5)(wq, wk, logits)
    assert (wq._version, wk._version) == versions


@pytest.mark.parametrize(
    ("q", "k", "logits", "message"),
    [
        ((8, 12), (8, 4), (5,), r"leaf 'l'.*\(8, 12\), \(8, 4\), \(5,\)"),
        ((8, 12), (8, 5), (3,), "leaf 'l'"),
        ((8, 12), (8, 8), (3,), "leaf 'l'"),
        ((8, 12), (7, 4), (3,), "leaf 'l'"),
        ((8, 12), (8, 4), (3, 1), "leaf 'l'"),
    ],
)
def test_shapes_that_do_not_fit(q, k, logits, message):
    with pytest.raises(ValueError, match=message):
        optim.qk_clip(1.0)({"l": torch.ones(q)}, {"l": torch.ones(k)}, {"l": torch.ones(logits)})


def test_trees_that_do_not_fit():
    with pytest.raises(ValueError, match="the logits lack the leaf 'b'"):
        optim.qk_clip(1.0)({"a": torch.ones(1, 1), "b": torch.ones(1, 1)}, {"a": torch.ones(1, 1), "b": 0}, {"a": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": torch.ones(2, 3, 4)}, r"q must be \[batch, heads, length, head_dim\], got shape \(2, 3, 4\)"),
        ({"k": torch.ones(1, 2, 5, 6)}, "2 key heads must divide 3 query heads"),
        ({"k": torch.ones(1, 3, 5, 7)}, "must agree in batch and head_dim"),
        ({"k": torch.ones(1, 3, 4, 6)}, "needs q_len = kv_len, got 5 and 4"),
        ({"segment_ids": torch.ones(1, 4)}, r"segment_ids must be \(1, 5\), got \(1, 4\)"),
        ({"block": 0}, "block must be at least 1, got 0"),
    ],
)
def test_bad_logit_arguments(arguments, message):
    q = arguments.pop("q", torch.ones(1, 3, 5, 6))
    k = arguments.pop("k", torch.ones(1, 3, 5, 6))
    with pytest.raises(ValueError, match=message):
        optim.max_attention_logits(q, k, **arguments)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_maximum_that_has_no_factor_raises_with_its_leaf_and_head(value):
    weights = {"a": torch.ones(4, 6), "b": torch.ones(4, 6)}
    logits = {"a": torch.tensor([1.0, 2.0, -math.inf]), "b": torch.tensor([9.0, value, 1.0])}
    with pytest.raises(ValueError, match=rf"leaf 'b' has a largest logit of {value} in head 1"):
        optim.qk_clip(5.0)(weights, weights, logits)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_inside_a_transform_such_a_head_becomes_nan_and_no_other(value):
    q, k = torch.ones(4, 6), torch.ones(4, 6)
    logits = torch.tensor([[9.0, value, 1.0]])
    new_q, new_k = torch.func.vmap(lambda maximum: optim.qk_clip(5.0)(q, k, maximum))(logits)
    for new in (new_q[0], new_k[0]):
        assert new[:, 2:4].isnan().all()
        assert new[:, :2].isfinite().all() and torch.equal(new[:, 4:], torch.ones(4, 2))
