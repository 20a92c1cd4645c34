"""Rotary positions, packed documents, grouped queries, and the core that a replay is given back."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import attention as attention_module
from functional_moe.attention import (
    AttentionCore,
    Projected,
    _core_gradient,
    attend,
    attention_half,
    document_starts,
    make_positions,
    project,
    rotary_tables,
    rotate,
)
from functional_moe.chain import logits, loss_fn
from functional_moe.model import IGNORE_INDEX
from functional_moe.tree import named_leaves

# fp64: the same sums in another order, through a few layers.
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_rotary_tables_are_exact_at_long_positions(make_config):
    """transformers PR 29285: in bf16 they are off by 1e-1 here. 1e-3 is the case's bound; fp32 of fp64 has 6e-8."""
    config = make_config(head_dim=64, rope_theta=10_000.0)
    cos, sin = rotary_tables(torch.tensor([8191]), config, torch.float32)
    assert cos.dtype == sin.dtype == torch.float32
    for i in range(32):
        angle = 8191 * 10_000.0 ** (-2 * i / 64)
        assert abs(float(cos[0, i]) - math.cos(angle)) < 1e-6
        assert abs(float(sin[0, i]) - math.sin(angle)) < 1e-6


@pytest.mark.parametrize(
    "options", [{"qk_norm_over_heads": True}, {"clip_qkv": 0.7}, {"qk_norm_over_heads": True, "clip_qkv": 0.7}, {}]
)
def test_fused_and_reference_kernels_agree_on_every_option(make_config, make_params, make_balance, make_batch, options):
    config = make_config(compute_dtype="float64", attention_output_bias=True, **options)
    params, balance, batch = make_params(config), make_balance(config), make_batch(config)

    def value_and_gradient(kernels):
        return torch.func.grad_and_value(lambda p: loss_fn(p, balance, batch, config, kernels=kernels)[0])(params)

    (fused, fused_loss), (reference, reference_loss) = value_and_gradient("fused"), value_and_gradient("reference")
    torch.testing.assert_close(fused_loss, reference_loss, **EXACT)
    torch.testing.assert_close(named_leaves(fused), named_leaves(reference), **EXACT)
    if config.clip_qkv:
        unbound, _ = loss_fn(params, balance, batch, dataclasses.replace(config, clip_qkv=None))
        assert abs(float(unbound - fused_loss)) > 1e-3


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float32", "float64"])
def test_tables_are_fp32_or_better_whatever_the_compute_dtype(make_config, compute_dtype):
    config = make_config(compute_dtype=compute_dtype, max_position_embeddings=9000)
    like = torch.zeros(1, dtype=config.dtype)
    positions = make_positions(8192, None, config, like)
    exact, _ = rotary_tables(torch.arange(8192)[None], config, torch.float64)
    assert positions.cos.dtype == torch.promote_types(torch.float32, config.dtype)
    assert float((positions.cos.double() - exact).abs().max()) < 1e-6


def test_rotation_pairs_entry_i_with_i_plus_half():
    """The half-split order of Llama, Qwen and GLM; interleaved pairs are another model (transformers 39687)."""
    x = torch.arange(1.0, 7.0).view(1, 1, 1, 6)
    quarter = torch.tensor([[[0.0, 1.0]]])  # cosines of angles 90 and 0 degrees
    out = rotate(x, quarter, 1 - quarter)
    # pairs (1, 3) and (2, 4): the first turned by 90 degrees, (1, 3) -> (-3, 1); 5 and 6 pass
    assert out.flatten().tolist() == [-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]


@given(shift=st.integers(0, 3000), distance=st.integers(0, 50))
def test_scores_depend_on_distance_alone(make_config, shift, distance):
    config = make_config(head_dim=8, partial_rotary_factor=0.5)
    q, k = random(1, 1, 1, 8), random(1, 1, 1, 8, seed=1)

    def score(at_q, at_k):
        rotated = [
            rotate(x, *rotary_tables(torch.tensor([[at]]), config, torch.float64)) for x, at in ((q, at_q), (k, at_k))
        ]
        return float((rotated[0] * rotated[1]).sum())

    # fp64 angles of up to 3000 radians are off by 3000 * 1e-16.
    assert score(shift + distance, shift) == pytest.approx(score(distance, 0), abs=1e-10)


def test_rotation_keeps_dtype_and_norm(make_config):
    config = make_config(head_dim=8)
    tables = rotary_tables(torch.arange(5)[None], config, torch.float32)
    x = random(2, 5, 3, 8, dtype=torch.bfloat16)
    out = rotate(x, *tables)
    assert out.dtype == torch.bfloat16
    # A rotation, then one rounding to 8 bits.
    torch.testing.assert_close(out.float().norm(dim=-1), x.float().norm(dim=-1), rtol=1e-2, atol=1e-2)


@given(lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3), data=st.data())
def test_positions_restart_where_documents_start(make_config, lengths, data):
    """Against the definition, for any numbers that change between neighbours: 1, 2, 1 is three documents."""
    config = make_config()
    seq = max(map(sum, lengths))
    rows = []
    for documents in lengths:
        documents = [*documents, seq - sum(documents)] if sum(documents) < seq else documents
        ids, last = [], None
        for length in documents:
            number = data.draw(st.integers(0, 3).filter(lambda n, last=last: n != last))
            ids += [(number, start) for start in [len(ids)] for _ in range(length)]
            last = number
        rows.append(ids)
    segment_ids = torch.tensor([[number for number, _ in ids] for ids in rows])
    positions = make_positions(seq, segment_ids, config, torch.zeros(1, dtype=torch.float64))
    for row, ids in enumerate(rows):
        expected = torch.tensor([i - start for i, (_, start) in enumerate(ids)])
        cos, sin = rotary_tables(expected, config, torch.float64)
        assert torch.equal(positions.cos[row], cos)
        assert torch.equal(positions.sin[row], sin)
        assert positions.starts[row].tolist() == [start for _, start in ids]


def draw_projected(batch, queries, keys, kv, shared, dim, dtype=torch.float64, device="cpu"):
    """As ``project`` makes them: heads are the inner axis."""
    shapes = ((batch, queries, kv * shared, dim), (batch, keys, kv, dim), (batch, keys, kv, dim))
    drawn = (random(*shape, seed=seed, dtype=dtype).to(device) for seed, shape in enumerate(shapes))
    return Projected(*(x.transpose(1, 2) for x in drawn))


def draw_starts(batch, seq, seed):
    """Documents of a few tokens, others in each row."""
    ids = (random(batch, seq, seed=seed) > 0.6).cumsum(1)
    return document_starts(ids)


def seen_by(projected, starts):
    """The definition, [batch, 1, queries, keys]: the queries are the last of the keys, in one document."""
    batch, _, queries, _ = projected.q.shape
    keys = projected.k.shape[2]
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    return seen if starts is None else seen & (starts[:, :, None] == starts[:, None, :])[:, None]


def naive_attention(projected, mask):
    """One query at a time."""
    q, k, v = projected
    batch, heads, queries, dim = q.shape
    shared = heads // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = mask[b, 0, i].nonzero().flatten()
                scores = k[b, h // shared, seen] @ q[b, h, i] / dim**0.5
                out[b, h, i] = scores.softmax(0) @ v[b, h // shared, seen]
    return out.transpose(1, 2).flatten(2)


# Sizes of attention: how many keys there are, and how many of them are queries too.
sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "queries": st.integers(1, 7),
        "kv": st.integers(1, 2),
        "shared": st.integers(1, 3),
        "dim": st.integers(1, 5),
    }
)
layouts = st.one_of(st.tuples(st.just("documents"), st.integers(0, 99)), st.tuples(st.just("past"), st.integers(0, 4)))


def draw_case(sizes, layout, dtype=torch.float64):
    kind, number = layout
    keys = sizes["queries"] + (number if kind == "past" else 0)
    starts = draw_starts(sizes["batch"], keys, number) if kind == "documents" else None
    return draw_projected(keys=keys, dtype=dtype, **sizes), starts


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@given(sizes=sizes, layout=layouts)
@settings(max_examples=30)
def test_attend_is_its_definition(kernels, sizes, layout):
    projected, starts = draw_case(sizes, layout)
    out, _ = attend(projected, starts, kernels)
    torch.testing.assert_close(out, naive_attention(projected, seen_by(projected, starts)), **EXACT)


@given(sizes=sizes, layout=layouts)
@settings(max_examples=30)
def test_the_core_is_the_output_and_the_log_sum_exp(sizes, layout):
    projected, starts = draw_case(sizes, layout)
    out, core = attend(projected, starts)
    assert torch.equal(core.output, out)
    q, k, _ = projected
    scores = q @ k.repeat_interleave(sizes["shared"], dim=1).mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen_by(projected, starts), -torch.inf)
    torch.testing.assert_close(core.log_sum_exp, scores.logsumexp(-1).transpose(1, 2), **EXACT)
    # so that a copy of it, made anywhere, has the same layout
    assert all(x.is_contiguous() and not x.requires_grad for x in core)


def gradients(projected, starts, kernels="fused", core=None):
    leaves = Projected(*(x.detach().requires_grad_() for x in projected))
    out, core = attend(leaves, starts, kernels, core)
    weights = random(*out.shape, seed=9, dtype=out.dtype).to(out.device)
    return out.detach(), core, torch.autograd.grad((out * weights).sum(), leaves)


@given(sizes=sizes, layout=layouts)
@settings(max_examples=30)
def test_gradients_are_those_of_the_reference(sizes, layout):
    projected, starts = draw_case(sizes, layout)
    _, _, ours = gradients(projected, starts)
    _, core, theirs = gradients(projected, starts, "reference")
    assert core is None
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_those_of_finite_differences(packed):
    projected = draw_projected(2, 5, 5, 2, 2, 3)
    starts = draw_starts(2, 5, seed=1) if packed else None
    _, core = attend(projected, starts)
    leaves = [x.detach().requires_grad_() for x in projected]
    assert torch.autograd.gradcheck(lambda *x: attend(Projected(*x), starts).out, leaves)
    # The gradient alone: with a core given, the result no longer follows the leaves.
    given_core = torch.autograd.grad(attend(Projected(*leaves), starts, core=core).out.sum(), leaves)
    computed = torch.autograd.grad(attend(Projected(*leaves), starts).out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(given_core, computed, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_document_a_row_is_what_torch_computes(dtype):
    """The same kernel by another way: bit for bit, forward and backward."""
    projected = draw_projected(2, 70, 70, 2, 3, 8, dtype)
    out, _, ours = gradients(projected, None)
    leaves = [x.detach().requires_grad_() for x in projected]
    theirs = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    assert torch.equal(out, theirs)
    weights = random(*out.shape, seed=9, dtype=dtype)
    for a, b in zip(ours, torch.autograd.grad((theirs * weights).sum(), leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_documents_are_what_torch_computes_with_a_mask(dtype, tolerance):
    """Blocks of other documents are not visited: equal but for rounding, of 8 bits in bf16."""
    projected = draw_projected(2, 70, 70, 2, 3, 8, dtype)
    starts = draw_starts(2, 70, seed=3)
    out, _, ours = gradients(projected, starts)
    leaves = [x.detach().requires_grad_() for x in projected]
    mask = seen_by(projected, starts)
    theirs = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(out, theirs, rtol=tolerance, atol=tolerance)
    weights = random(*out.shape, seed=9, dtype=dtype)
    for a, b in zip(ours, torch.autograd.grad((theirs * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Operators(TorchDispatchMode):
    """Counts the calls of each attention operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in str(func):
            self.calls.append(str(func.overloadpacket).removeprefix("aten._scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(sizes=sizes, layout=layouts)
@settings(max_examples=20)
def test_a_replay_is_bit_equal_and_runs_no_attention_forward(dtype, sizes, layout):
    projected, starts = draw_case(sizes, layout, dtype)
    with Operators() as first:
        out, core, grads = gradients(projected, starts)
    copied = AttentionCore(*(x.clone() for x in core))  # as after a stay in another memory
    with Operators() as second:
        out_again, core_again, grads_again = gradients(projected, starts, core=copied)
    assert torch.equal(out, out_again)
    for a, b in zip((*core, *grads), (*core_again, *grads_again), strict=True):
        assert torch.equal(a, b)
    assert set(first.calls) == {"flash_attention_for_cpu", "flash_attention_for_cpu_backward"}
    assert second.calls == [name for name in first.calls if name.endswith("backward")]


@pytest.mark.parametrize("packed", [False, True])
def test_the_attention_half_replays_bit_equal_under_torch_func(make_config, make_params, packed):
    config = make_config(compute_dtype="float32")
    layer = make_params(config)["layers"][0]
    x = random(2, 9, 10, dtype=torch.float32)
    segments = torch.tensor([[1] * 4 + [2] * 5, [1] * 9]) if packed else None
    positions = make_positions(9, segments, config, x)

    def half(layer, x, core=None):
        return attention_half(layer, x, positions, config, core=core)

    out, pull, core = torch.func.vjp(half, layer, x, has_aux=True)
    cotangent = random(2, 9, 10, seed=5, dtype=torch.float32)
    grads = pull(cotangent)
    with Operators() as operators:
        again, pull, same = torch.func.vjp(lambda layer, x: half(layer, x, core), layer, x, has_aux=True)
        assert not operators.calls
        grads_again = pull(cotangent)
    assert set(operators.calls) == {"flash_attention_for_cpu_backward"}
    leaves = torch.utils._pytree.tree_leaves
    for a, b in zip(leaves((out, core, grads)), leaves((again, same, grads_again)), strict=True):
        assert torch.equal(a, b)


def test_attention_of_documents_keeps_nothing_quadratic():
    """1024 tokens in two documents: no tensor of the forward or backward reaches 1024 x 1024 numbers, or a quarter."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(out):
                self.numel = max(self.numel, leaf.numel() if isinstance(leaf, torch.Tensor) else 0)
            return out

    projected = draw_projected(1, 1024, 1024, 1, 1, 4, torch.float32)
    starts = document_starts((torch.arange(1024) >= 300)[None])
    with Largest() as largest:
        gradients(projected, starts)
    assert largest.numel == 1024 * 4


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_attention_of_nothing_is_nothing(shape):
    batch, seq = shape
    for starts in (None, torch.zeros(batch, seq, dtype=torch.int64)):
        out, _, grads = gradients(draw_projected(batch, seq, seq, 1, 2, 3), starts)
        assert out.shape == (batch, seq, 6)
        assert [g.shape for g in grads] == [(batch, 2, seq, 3), (batch, 1, seq, 3), (batch, 1, seq, 3)]


def test_attend_refuses_what_does_not_belong_together():
    projected = draw_projected(2, 4, 4, 1, 2, 3)
    starts = torch.zeros(2, 4, dtype=torch.int64)
    _, core = attend(projected, None)
    with pytest.raises(ValueError, match="5 queries on 4 keys"):
        attend(draw_projected(2, 5, 4, 1, 2, 3), None)
    with pytest.raises(ValueError, match=r"starts has shape \(2, 4\).*\(2, 3\), and keys as many as queries, not 4"):
        attend(draw_projected(2, 3, 4, 1, 2, 3), starts)
    with pytest.raises(ValueError, match=r"starts has shape \(1, 4\)"):
        attend(projected, starts[:1])
    with pytest.raises(ValueError, match=r"core.output is torch.float64 \(1, 4, 6\).*= \(2, 4, 6\)"):
        attend(projected, None, core=AttentionCore(core.output[:1], core.log_sum_exp))
    with pytest.raises(ValueError, match=r"core.output is torch.float32"):
        attend(projected, None, core=AttentionCore(core.output.float(), core.log_sum_exp))
    with pytest.raises(ValueError, match=r"core.log_sum_exp has shape \(2, 4, 1\)"):
        attend(projected, None, core=AttentionCore(core.output, core.log_sum_exp[..., :1]))
    with pytest.raises(ValueError, match=r"kernels = 'reference'.*a core is of no use"):
        attend(projected, None, "reference", core)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("given", [False, True])
def test_other_transforms_are_refused_with_and_without_a_core(given):
    projected = draw_projected(1, 4, 4, 1, 1, 3)
    core = attend(projected, None).core if given else None

    def total(q):
        return attend(projected._replace(q=q), None, core=core).out.square().sum()

    refused = pytest.raises(NotImplementedError, match="kernels='reference'")
    with refused:
        torch.func.jvp(total, (projected.q,), (projected.q,))
    with refused:
        torch.func.vmap(total)(torch.stack([projected.q, projected.q]))
    with refused:
        torch.func.grad(lambda q: torch.func.grad(total)(q).sum())(projected.q)


# What CUDA's operators would be called with: bf16 and fp16 without documents take flash attention.
CUDA_CASES = [
    (torch.bfloat16, 7, 7, False, "flash_attention"),
    (torch.float16, 7, 7, False, "flash_attention"),
    (torch.bfloat16, 7, 7, True, "efficient_attention"),
    (torch.float32, 7, 7, False, "efficient_attention"),
    (torch.float32, 7, 7, True, "efficient_attention"),
    (torch.float32, 3, 7, False, "efficient_attention"),
    (torch.bfloat16, 1, 7, False, "efficient_attention"),
]


@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize(("dtype", "queries", "keys", "packed", "operator"), CUDA_CASES)
def test_shapes_on_a_pretended_cuda_device(dtype, queries, keys, packed, operator, dim):
    """Fake tensors have the shapes, dtypes and devices of CUDA's operators, and no values.

    The backward is called by itself: autograd aborts the process where torch was built without CUDA.
    """
    with FakeTensorMode():
        shapes = ((2, queries, 4, dim), (2, keys, 2, dim), (2, keys, 2, dim))
        projected = Projected(*(torch.empty(s, dtype=dtype, device="cuda").transpose(1, 2) for s in shapes))
        starts = torch.empty(2, keys, dtype=torch.int64, device="cuda") if packed else None
        with Operators() as operators:
            out, core = attend(projected, starts)
            again, _ = attend(projected, starts, core=core)
            grads = _core_gradient(torch.ones_like(again), *projected, starts, None, None, *core)
        assert operators.calls == [operator, f"{operator}_backward"]
        for x, like in zip((out, again, core.output, *grads), (out, out, out, *projected), strict=True):
            assert (x.shape, x.dtype, x.device) == (like.shape, dtype, like.device)
        assert out.shape == (2, queries, 4 * dim)
        assert core.log_sum_exp.dtype == torch.float32
        assert all(x.is_contiguous() for x in core)


def test_fp64_attention_on_cuda_asks_for_the_reference():
    with FakeTensorMode():
        x = torch.empty(1, 1, 4, 8, dtype=torch.float64, device="cuda")
        with pytest.raises(NotImplementedError, match=r"no attention in torch.float64 on cuda.*kernels='reference'"):
            attend(Projected(x, x, x), None)


def test_fake_tensors_on_the_cpu_take_rows_for_documents():
    with FakeTensorMode():
        projected = Projected(*(torch.empty(2, 2, 5, 3, requires_grad=True) for _ in range(3)))
        out, core = attend(projected, torch.empty(2, 5, dtype=torch.int64))
        grads = torch.autograd.grad(out.sum(), projected)
    assert out.shape == core.output.shape == (2, 5, 6)
    assert core.log_sum_exp.shape == (2, 5, 2)
    assert all(x.shape == (2, 2, 5, 3) for x in grads)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dim", [6, 64])
@pytest.mark.parametrize(("dtype", "queries", "keys", "packed", "operator"), CUDA_CASES)
def test_cuda_attention_is_the_reference_and_replays_bit_equal(dtype, queries, keys, packed, operator, dim):
    projected = draw_projected(2, queries, keys, 2, 2, dim, dtype, "cuda")
    starts = draw_starts(2, keys, seed=1).cuda() if packed else None
    out, core, grads = gradients(projected, starts)
    expected, _, expected_grads = gradients(Projected(*(x.double() for x in projected)), starts, "reference")
    tolerance = 1e-2 if dtype == torch.float32 else 5e-2  # TF32 has 10 bits, bf16 8
    for a, b in zip((out, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    out_again, _, _ = gradients(projected, starts, core=AttentionCore(*(x.clone() for x in core)))
    assert torch.equal(out, out_again)


def test_projection_norms_before_it_rotates_and_leaves_values_alone(make_config, make_params):
    config = make_config(compute_dtype="float64")
    params = make_params(config)["layers"][0]["attention"]
    x = random(1, 3, 10)
    positions = make_positions(3, None, config, x)
    q, k, v = project(params, x, positions.cos, positions.sin, config)
    _, k_weight, v_weight = params["qkv"].split([4 * 6, 2 * 6, 2 * 6], dim=-1)
    _, k_bias, v_bias = params["qkv_bias"].split([4 * 6, 2 * 6, 2 * 6])
    raw = (x @ k_weight + k_bias).view(1, 3, 2, 6)
    normed = raw / (raw.square().mean(-1, keepdim=True) + 1e-6).sqrt() * params["k_norm"]
    torch.testing.assert_close(k, rotate(normed, positions.cos, positions.sin).transpose(1, 2), **EXACT)
    torch.testing.assert_close(v, (x @ v_weight + v_bias).view(1, 3, 2, 6).transpose(1, 2), **EXACT)
    assert q.shape == (1, 4, 3, 6)


# A packed row: lengths of documents, and of padding after them.
packings = st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3))


@pytest.mark.parametrize(
    "options", [{}, {"use_qk_norm": False}, {"partial_rotary_factor": 0.7}, {"num_key_value_heads": 1}]
)
@given(piece=st.sampled_from([1, 30, 100, 10**6]), packed=st.booleans(), data=st.data())
@settings(max_examples=8)
def test_queries_keys_and_values_are_the_same_in_pieces(make_config, make_params, options, piece, packed, data):
    """Pieces of one token, of parts of rows, of several rows; documents, whose positions differ between rows."""
    config = make_config(compute_dtype="float64", attention_bias=True, **options)
    params = make_params(config)["layers"][0]["attention"]
    batch, seq = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    x = random(batch, seq, config.hidden_size, seed=1)
    documents = torch.randint(1, 3, (batch, seq), generator=torch.Generator().manual_seed(seq)) if packed else None
    positions = make_positions(seq, documents, config, x)

    def run(kernels):
        def function(params, x):
            return tuple(project(params, x, positions.cos, positions.sin, config, kernels))

        made, pull_back = torch.func.vjp(function, params, x)
        return made, pull_back(tuple(random(*part.shape, seed=index) for index, part in enumerate(made)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_PIECE", piece)
        found, expected = run("fused"), run("reference")
    torch.testing.assert_close(found, expected, **EXACT)


def test_queries_alone_have_a_gradient_too(make_config, make_params):
    """Of keys and values, whose cotangents nobody gives, it is zero."""
    config = make_config(compute_dtype="float64")
    params, x = make_params(config)["layers"][0]["attention"], random(2, 3, config.hidden_size)
    cos, sin, _ = make_positions(3, None, config, x)
    gradients = [
        torch.func.grad(lambda p, kernels=kernels: project(p, x, cos, sin, config, kernels).q.square().sum())(params)
        for kernels in ("fused", "reference")
    ]
    torch.testing.assert_close(*gradients, **EXACT)
    assert gradients[0]["q_norm"].any() and not gradients[0]["k_norm"].any()


def packed_batch(config, lengths, padding, seed, numbers=None):
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(config.vocab_size, (2, length), generator=generator) for length in lengths]
    numbers = numbers or list(range(1, len(lengths) + 1))
    ids = [number for number, length in zip(numbers, lengths, strict=True) for _ in range(length)] + [0] * padding
    rest = torch.randint(config.vocab_size, (2, padding), generator=generator)
    rest[1] = IGNORE_INDEX
    row = torch.cat([*documents, rest], dim=1)
    tokens = row[0].clone()
    return documents, {
        "tokens": tokens[None],
        "targets": row[1][None],
        "segment_ids": torch.tensor([ids]),
    }


@pytest.fixture(scope="module")
def model(make_config, make_params, make_balance):
    config = make_config(compute_dtype="float64", num_shared_experts=1)
    return config, make_params(config), make_balance(config)


@pytest.mark.parametrize("kernels", ["fused", "reference"])
@given(packing=packings, seed=st.integers(0, 99))
@example(packing=([2, 3, 2], 1), seed=0)
@settings(max_examples=25)
def test_a_packed_document_has_the_logits_it_has_alone(model, kernels, packing, seed):
    config, params, balance = model
    lengths, padding = packing
    # 1, 2, 1, 2: numbers may come back, only neighbours have to differ
    documents, batch = packed_batch(config, lengths, padding, seed, [1 + i % 2 for i in range(len(lengths))])
    together = logits(params, balance, batch, config, kernels)[0].split([*lengths, padding] if padding else lengths)
    for document, ours in zip(documents, together, strict=False):
        alone = logits(params, balance, {"tokens": document[:1], "targets": document[1:]}, config, kernels)[0]
        torch.testing.assert_close(ours, alone, **EXACT)


@given(packing=packings, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=25)
def test_a_token_depends_on_no_other_document_no_padding_and_no_later_token(model, packing, seed, data):
    config, params, balance = model
    lengths, padding = packing
    _, batch = packed_batch(config, lengths, padding, seed)
    at = data.draw(st.integers(0, sum(lengths) + padding - 1), label="changed token")
    changed = {**batch, "tokens": batch["tokens"].clone()}
    changed["tokens"][0, at] = (batch["tokens"][0, at] + 1) % config.vocab_size
    before, after = (logits(params, balance, b, config)[0] for b in (batch, changed))
    segments = batch["segment_ids"][0]
    reached = (segments == segments[at]) & (torch.arange(len(segments)) >= at)
    # Routed rows move in their blocks when another token chooses another expert: equal but for the order of sums.
    torch.testing.assert_close(before[~reached], after[~reached], **EXACT)
    assert not torch.allclose(before[at], after[at])


@given(packing=packings, seed=st.integers(0, 99), more=st.integers(1, 4))
@settings(max_examples=25)
def test_padding_counts_in_no_loss_no_count_and_no_gradient(model, packing, seed, more):
    config, params, balance = model
    lengths, padding = packing
    _, batch = packed_batch(config, lengths, padding, seed)

    def run(batch):
        gradient, (loss, metrics) = torch.func.grad_and_value(
            lambda p: loss_fn(p, balance, batch, config), has_aux=True
        )(params)
        return loss, metrics, gradient

    filler = torch.full((1, more), 5)
    padded = {
        "tokens": torch.cat([batch["tokens"], filler], 1),
        "targets": torch.cat([batch["targets"], torch.full_like(filler, IGNORE_INDEX)], 1),
        "segment_ids": torch.cat([batch["segment_ids"], torch.zeros_like(filler)], 1),
    }
    ours, theirs = run(batch), run(padded)
    assert torch.equal(ours[1].counts, theirs[1].counts)
    for a, b in zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def test_a_batch_of_one_document_needs_no_segment_ids(model):
    config, params, balance = model
    _, batch = packed_batch(config, [7], 0, 0)
    with_ids = logits(params, balance, batch, config)
    del batch["segment_ids"]
    torch.testing.assert_close(with_ids, logits(params, balance, batch, config), **EXACT)
