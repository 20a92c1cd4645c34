"""The train step over ranks equals the step of one process: invariant 1, and the failures that others had with it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from functional_moe import memory, optim, parallel, train_step
from functional_moe.chain import make_chain
from functional_moe.config import MoEConfig
from functional_moe.model import init_balance
from functional_moe.parameters import init, labels, matrix_axes
from functional_moe.sharding import make_sharding, model_layout
from functional_moe.train_step import init_state, make_train_step
from functional_moe.tree import named_leaves

Mesh = tuple[int, int, int]
"""Sizes of ``fsdp``, ``ep`` and ``replicate``."""

# Sizes that no axis divides, every optional part, experts that get no token.
CONFIG = MoEConfig(
    vocab_size=23,
    hidden_size=10,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=7,
    intermediate_size=9,
    first_k_dense_replace=1,
    num_shared_experts=1,
    shared_expert_gate=True,
    scoring_func="sigmoid",
    use_qk_norm=True,
    attention_bias=True,
    router_aux_loss_coef=0.05,
    router_z_loss_coef=0.01,
    balance_update_rate=0.01,
    initializer_range=0.3,
    compute_dtype="float64",
)
MESHES: list[Mesh] = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (3, 2, 1)]
KEEP_GRAPH = memory.Recipe()
RECIPES = {
    "keep": (KEEP_GRAPH, KEEP_GRAPH),
    "recompute": (memory.Recipe(record=False), memory.Recipe(record=False, input="recompute")),
    "offload": (
        memory.Recipe(record=False, input="offload", residuals={"core": "offload"}),
        memory.Recipe(record=False, input="offload", residuals={"decision": "offload"}),
    ),
    "attention kept": (memory.Recipe(record=False, residuals={"core": "keep"}), memory.Recipe(record=False)),
}
"""Of the two halves of a layer."""


class Problem(NamedTuple):
    """Some steps, as they are on any mesh."""

    config: MoEConfig
    params: Any  # in full
    batches: Sequence[Mapping[str, Tensor]]  # in full, one for each step
    rows: tuple[int, ...] | None = None  # of each rank; as even as they can be when not given
    accumulate: int = 1  # on ranks; one process takes its batch whole
    optimizer: str = "gradient"
    recipes: Mapping[str, memory.Recipe] = {}
    order: memory.Order = "depth_first"
    prefetch: int = 1
    again: bool = True
    balance: Tensor | None = None
    expert_parts: int = 1  # on ranks
    gather_dtype: torch.dtype | None = None


class Outcome(NamedTuple):
    """What came of them, in full."""

    gradients: list[dict[str, Tensor]]  # of each step, before any clipping
    counts: list[Tensor]  # int64 [moe_layers, experts]
    metrics: list[train_step.StepMetrics]
    state: train_step.TrainState


def make_optimizer(problem: Problem, layout: parallel.Layout | None) -> optim.GradientTransformation:
    """``gradient`` subtracts it once, ``sgd`` clips before it accelerates, ``muon`` is what training uses."""
    if problem.optimizer == "gradient":
        return optim.sgd(1.0)
    norm, orthogonalize = None, optim.orthogonalize_here
    if layout is not None:
        norm = functools.partial(parallel.global_norm, layout=layout)
        # Small, so that there are several buckets.
        orthogonalize = parallel.owner_orthogonalize(layout, bucket_bytes=2000)
    clip = optim.clip_by_global_norm(0.5, norm)
    if problem.optimizer == "sgd":
        return optim.chain(clip, optim.sgd(0.1, momentum=0.9))
    of_leaves = labels(problem.config)
    adamw = optim.adamw(0.02, weight_decay=0.1)
    by_label = dict.fromkeys(pytree.tree_leaves(of_leaves), adamw)
    by_label["matrix"] = optim.muon(0.1, matrix_axes(problem.config), weight_decay=0.1, orthogonalize=orthogonalize)
    return optim.chain(clip, optim.partition(by_label, of_leaves))


def in_full(tree: Any) -> Any:
    """DTensors anywhere in a tree brought together; the rest as it is."""
    return pytree.tree_map(lambda leaf: parallel.unshard({"": leaf})[""] if isinstance(leaf, DTensor) else leaf, tree)


def run_steps(problem: Problem, mesh: Mesh | None = None) -> Outcome:
    """On one process without a mesh; else every rank has the same outcome."""
    config, params, layout, layers = problem.config, problem.params, None, None
    if mesh is not None:
        layout = model_layout(config, parallel.make_mesh(*mesh))
        params = parallel.shard(params, layout)
        sizes = make_sharding(config, layout, None, torch.float64).layers.sizes
        layers = memory.Gathers(sizes, problem.prefetch, problem.again)
    accumulate = 1 if mesh is None else problem.accumulate
    optimizer = make_optimizer(problem, layout)
    gradients: list[Any] = []
    counts: list[Tensor] = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        # With the placements of the parameters (pytorch 172932), or this refuses.
        full = updates if layout is None else parallel.unshard(parallel.from_local(updates, layout))
        gradients.append(named_leaves(full))
        return optimizer.update(updates, state, params)

    def update_balance(balance: Tensor, counted: Tensor, config: MoEConfig) -> Tensor:
        counts.append(counted)
        return moved(balance, counted, config)

    step = make_train_step(
        config,
        optim.GradientTransformation(optimizer.init, update),
        layout=layout,
        schedule=memory.make_schedule(
            make_chain(config),
            {} if mesh is None else problem.recipes,
            microbatches=accumulate,
            order=problem.order,
            gathers=layers,
        ),
        slabs={memory.HOST: 1 << 20},
        copies=memory.AdversarialCopies(seed=0),
        accumulate=accumulate,
        expert_parts=1 if mesh is None else problem.expert_parts,
        gather_dtype=problem.gather_dtype,
        reduce_dtype=torch.promote_types(config.dtype, torch.float32),
    )
    state, metrics = init_state(params, optimizer, config), []
    if problem.balance is not None:
        state = state._replace(balance=problem.balance)
    with pytest.MonkeyPatch.context() as patch:
        moved = train_step.update_balance
        patch.setattr(train_step, "update_balance", update_balance)
        for batch in problem.batches:
            if mesh is not None:
                ranks = dist.get_world_size()
                rows = problem.rows or parallel.chunk_sizes(len(batch["tokens"]), ranks)
                batch = {key: value.split(list(rows))[dist.get_rank()] for key, value in batch.items()}
            state, one = step(state, batch)
            metrics.append(one)
    if layout is not None:
        check_placements(state, layout)
    return Outcome(gradients, counts, metrics, in_full(state))


def check_placements(state: train_step.TrainState, layout: parallel.Layout) -> None:
    """Parameters lie where the layout says, and so does what the optimizer keeps for each."""
    assert parallel.layout_of(state.params).placements == layout.placements
    params = named_leaves(state.params)
    for path, leaf in named_leaves(state.opt_state).items():
        if leaf.ndim:
            like = params[max((name for name in params if path.endswith(f".{name}")), key=len)]
            assert isinstance(leaf, DTensor), path
            assert (leaf.placements, leaf.shape) == (like.placements, like.shape), path
            assert leaf.to_local().shape == like.to_local().shape, path


def doubled(params: Any) -> Any:
    """In float64, where what remains of a difference is the order of sums."""
    return pytree.tree_map(lambda leaf: leaf.to(torch.float64), params)


def batches(config: MoEConfig, rows: int) -> list[dict[str, Tensor]]:
    """Two batches, rows of different lengths."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(2):
        tokens = torch.randint(config.vocab_size, (rows, 7), generator=generator)
        targets = torch.randint(config.vocab_size, (rows, 7), generator=generator)
        segment_ids = torch.ones(rows, 7, dtype=torch.int64)
        for row in range(rows):
            segment_ids[row, 7 - row % 5 :] = 0
        targets[0] = -100
        out.append({"tokens": tokens, "targets": targets, "segment_ids": segment_ids})
    return out


def assert_equal(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    """Counts and balance exactly; the rest by the norms of leaves.

    Parameters are held to ``tolerance``, and so are the gradients of the first step, in float64 to 1e-9; a thousandth
    of the whole gradient's norm is added to a leaf's, because one that is mathematically nothing is nothing but
    rounding. From then on parameters differ by what float32 makes of norms and of Newton-Schulz, whatever the dtype,
    and gradients follow them: later ones, and the moments that add them up, are held to ``tolerance`` of the whole.
    """
    assert all(torch.equal(a, b) for a, b in zip(found.counts, expected.counts, strict=True))
    assert torch.equal(found.state.balance, expected.state.balance)
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        torch.testing.assert_close(ours._asdict(), theirs._asdict(), rtol=tolerance, atol=1e-9)
    first, *later = zip(found.gradients, expected.gradients, strict=True)
    exact = first[1]["embedding"].dtype == torch.float64
    assert_close("gradient", *first, 1e-9 if exact else tolerance, share=1e-3)
    for ours, theirs in later:
        assert_close("later gradient", ours, theirs, tolerance, share=1.0)
    assert_close("parameter", named_leaves(found.state.params), named_leaves(expected.state.params), tolerance)
    moments = (named_leaves(one.state.opt_state) for one in (found, expected))
    assert_close("moment", *moments, tolerance, share=1.0)


def assert_close(
    what: str, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, share: float = 0.0
) -> None:
    """Each leaf up to ``tolerance`` of its norm and ``share`` of that of all."""
    assert found.keys() == expected.keys()
    whole = float(torch.stack([leaf.double().norm() for leaf in expected.values()]).norm())
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype
        error, norm = float((found[path] - leaf).double().norm()), float(leaf.double().norm())
        assert error <= tolerance * (norm + share * whole), f"{what} {path} of norm {norm:.1e} is off by {error:.1e}"


def schedule_of(config: MoEConfig, name: str) -> dict[str, memory.Recipe]:
    """The recipes of that name for every segment between embedding and head."""
    attention, feed_forward = RECIPES[name]
    recipes = {}
    for one in make_chain(config).segments[1:-1]:
        half = attention if one.kind == "attention" else feed_forward
        recipes[one.name] = half._replace(residuals={k: v for k, v in half.residuals.items() if k in one.residuals})
    return recipes


def run_all(problems: Sequence[Problem], mesh: Mesh | None = None) -> list[Outcome]:
    return [run_steps(problem, mesh) for problem in problems]


def on_ranks(problem: Problem, mesh: Mesh) -> list[Outcome]:
    return [found for (found,) in all_on_ranks([problem], mesh)]


def all_on_ranks(problems: Sequence[Problem], mesh: Mesh) -> list[list[Outcome]]:
    """Of each rank, the outcome of each problem."""
    return parallel.shared_pool().run(run_all, math.prod(mesh), problems, mesh)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_steps_equal_those_of_one_process(mesh: Mesh, accumulate: int, recipe: str) -> None:
    rows = 5 if accumulate == 1 else 2 * math.prod(mesh)
    config = dataclasses.replace(CONFIG, tie_word_embeddings=accumulate == 2)
    problem = Problem(
        config,
        doubled(init(config, seed=1)),
        batches(config, rows),
        accumulate=accumulate,
        optimizer="sgd",
        recipes=schedule_of(config, recipe),
        expert_parts=2 * accumulate - 1,
    )
    expected = run_steps(problem)
    for found in on_ranks(problem, mesh):
        assert_equal(found, expected, 1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_kept_graph_finds_its_layer_though_others_had_the_buffer(accumulate: int) -> None:
    """Six layers of one size in one to four buffers; a layer that came back elsewhere would be another's."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=6, first_k_dense_replace=0)
    problem = Problem(config, doubled(init(config, seed=1)), batches(config, 4)[:1], accumulate=accumulate)
    expected = run_steps(problem)
    ways = [
        problem._replace(prefetch=prefetch, recipes=schedule_of(config, recipe))
        for prefetch in range(3)
        for recipe in ("keep", "attention kept")
    ]
    for found in all_on_ranks(ways, (2, 1, 1)):
        for outcome in found:
            assert_equal(outcome, expected)


# --- matrices that travel in fp8 ---

FP8 = torch.float8_e4m3fn


FP8_DIMS = {"qkv": -1, "gate_up": -1, "o": -2, "down": -2}
"""Blocks run along what is not hidden."""


def of_matrices(function: Callable[[Tensor, int], Tensor], params: Any) -> Any:
    """``params`` with each matrix replaced by ``function(matrix, dimension of its blocks)``."""

    def one(path: Any, leaf: Tensor) -> Tensor:
        dim = FP8_DIMS.get(path[-1].key)
        return leaf if dim is None else function(leaf, leaf.ndim + dim)

    return pytree.tree_map_with_path(one, params)


def fp8_problem() -> Problem:
    """Matrices in blocks of 128 and a rest, so different along the hidden axis that blocks along it would show."""
    config = dataclasses.replace(CONFIG, head_dim=50, moe_intermediate_size=131, intermediate_size=135)

    def spread(leaf: Tensor, dim: int) -> Tensor:
        hidden = 2 * leaf.ndim - 3 - dim  # the other one of the last two
        shape = [-1 if axis == hidden else 1 for axis in range(leaf.ndim)]
        return leaf * torch.exp2(-2 * torch.arange(config.hidden_size, dtype=leaf.dtype)).view(shape)

    params = of_matrices(spread, doubled(init(config, seed=1)))
    return Problem(config, params, batches(config, 5), gather_dtype=FP8)


def rounded(params: Any) -> Any:
    """What is computed with."""
    return of_matrices(parallel.round_to_fp8, params)


def test_a_step_in_fp8_is_one_of_rounded_parameters_that_moves_the_wide_ones() -> None:
    problem = fp8_problem()
    found = run_steps(problem)
    params, balance = problem.params, None
    for batch, gradient in zip(problem.batches, found.gradients, strict=True):
        plain = run_steps(Problem(problem.config, rounded(params), [batch], balance=balance))
        balance = plain.state.balance
        assert_close("gradient", gradient, plain.gradients[0], 1e-12)
        params = pytree.tree_map(torch.sub, params, from_names(params, gradient))
    assert_close("parameter", named_leaves(found.state.params), named_leaves(params), 1e-12)
    exact = run_steps(problem._replace(gather_dtype=None))
    assert abs(float(exact.metrics[0].loss - found.metrics[0].loss)) > 1e-6


def from_names(like: Any, leaves: Mapping[str, Tensor]) -> Any:
    return pytree.tree_unflatten([leaves[name] for name in named_leaves(like)], pytree.tree_structure(like))


@pytest.mark.parametrize("mesh", [*MESHES, (4, 1, 1)], ids=lambda sizes: "x".join(map(str, sizes)))
def test_two_steps_in_fp8_equal_those_of_one_process(mesh: Mesh) -> None:
    problem = fp8_problem()
    expected = run_steps(problem)
    ways = [problem._replace(recipes=schedule_of(problem.config, recipe)) for recipe in ("keep", "offload")]
    for found in all_on_ranks(ways, mesh):
        for outcome in found:
            assert_equal(outcome, expected, 1e-6)
            # Had one element been rounded elsewhere, the second gradient would not be this.
            for ours, theirs in zip(outcome.gradients, expected.gradients, strict=True):
                assert_close("gradient", ours, theirs, 1e-9, share=1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_refuses_the_step_in_fp8(value: float) -> None:
    problem = fp8_problem()
    problem.params["layers"][1]["experts"]["down"][2, 130, 3] = value
    for found in on_ranks(problem, (2, 1, 1)):
        assert not any(bool(one.finite) for one in found.metrics)


def losses(gather_dtype: torch.dtype, mesh: Mesh) -> list[float]:
    """Of twenty steps on one batch, computed in bf16."""
    config = dataclasses.replace(
        CONFIG, hidden_size=32, head_dim=8, moe_intermediate_size=48, compute_dtype="bfloat16", initializer_range=0.1
    )
    layout = model_layout(config, parallel.make_mesh(*mesh))
    optimizer = make_optimizer(Problem(config, None, [], optimizer="muon"), layout)
    step = make_train_step(config, optimizer, layout=layout, gather_dtype=gather_dtype)
    state = init_state(init(config, seed=1, layout=layout), optimizer, config)
    full = batches(config, 8)[0]
    rows = {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in full.items()}
    found = []
    for _ in range(20):
        state, metrics = step(state, rows)
        found.append(float(metrics.loss))
    return found


def test_training_in_fp8_goes_as_in_bf16() -> None:
    pool = parallel.shared_pool()
    bf16, fp8 = (pool.run(losses, 2, dtype, (2, 1, 1))[0] for dtype in (torch.bfloat16, FP8))
    assert bf16[0] > 3
    assert max(bf16[-1], fp8[-1]) < 0.5
    # From 3.2 to 0.1 nats the two are 0.06 apart in the mean.
    assert sum(abs(ours - theirs) for ours, theirs in zip(fp8, bf16, strict=True)) / 20 < 0.15
    assert fp8 != bf16


def test_what_no_parameter_travels_in_is_refused() -> None:
    for dtype in (torch.float8_e5m2, torch.int8, torch.float16):
        with pytest.raises(ValueError, match=f"gather_dtype = {dtype}: parameters travel in torch.float32"):
            make_train_step(CONFIG, optim.sgd(0.1), gather_dtype=dtype)
    with pytest.raises(ValueError, match="no gather_dtype"):
        make_train_step(CONFIG, optim.sgd(0.1), kernels="reference", gather_dtype=FP8)


# --- the same for any mesh, sizes, schedule and rows ---

ALL_MESHES = sorted(
    (
        (fsdp, ep, replicate)
        for fsdp in range(1, 9)
        for ep in range(1, 9)
        for replicate in range(1, 9)
        if fsdp * ep * replicate <= 8
    ),
    key=lambda sizes: (math.prod(sizes), sizes),
)


@st.composite
def configs(draw: st.DrawFn, ep: int) -> MoEConfig:
    experts = ep * draw(st.integers(1 if ep > 1 else 2, 3))
    top_k = draw(st.integers(1, min(3, experts)))
    shared = draw(st.integers(0, 1))
    layers = draw(st.integers(1, 3))
    return MoEConfig(
        vocab_size=draw(st.integers(5, 29)),
        hidden_size=draw(st.sampled_from([4, 5, 7, 9, 10, 16])),
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([2, 6])),
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=top_k > 1 and draw(st.booleans()),
        moe_intermediate_size=draw(st.integers(2, 9)),
        intermediate_size=draw(st.integers(2, 9)),
        first_k_dense_replace=draw(st.integers(0, layers - 1)),
        num_shared_experts=shared,
        shared_expert_gate=bool(shared) and draw(st.booleans()),
        scoring_func=draw(st.sampled_from(["softmax", "sigmoid"])),
        use_qk_norm=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        router_aux_loss_coef=draw(st.sampled_from([0.0, 0.05])),
        router_z_loss_coef=draw(st.sampled_from([0.0, 0.01])),
        balance_update_rate=0.01,
        balance_centred=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,
        loss_chunk_size=draw(st.sampled_from([3, 1024])),
        compute_dtype=draw(st.sampled_from(["float64", "float32"])),
    )


@st.composite
def schedules(draw: st.DrawFn, config: MoEConfig) -> dict[str, memory.Recipe]:
    """A recipe for each segment, whatever its neighbours'."""
    recipes, record_before = {}, True
    for segment in make_chain(config).segments[1:-1]:
        if draw(st.booleans()):
            recipes[segment.name] = memory.Recipe(record=draw(st.just(True)))
            record_before = True
            continue
        policies = ["offload", "keep", "recompute"]
        residuals = {
            name: draw(st.sampled_from(policies[:2] if name in segment.decisions else policies))
            for name in segment.residuals
        }
        boundary = draw(st.sampled_from(policies[:2] if record_before else policies))
        recipes[segment.name] = memory.Recipe(False, boundary, residuals)
        record_before = False
    return recipes


class Drawn(NamedTuple):
    """What a problem is made of, small enough to be read when it fails."""

    config: MoEConfig
    mesh: Mesh
    rows: tuple[int, ...]  # of each rank
    lengths: tuple[int, ...]  # of each row; what follows is padding
    idle: int  # experts without a token
    seed: int
    accumulate: int
    optimizer: str
    recipes: Mapping[str, memory.Recipe]
    order: memory.Order
    prefetch: int
    again: bool
    expert_parts: int

    def problem(self) -> Problem:
        config, rows, seq = self.config, sum(self.rows), self.lengths[0]
        generator = torch.Generator().manual_seed(self.seed)
        steps = []
        for _ in range(2):
            tokens, targets = torch.randint(config.vocab_size, (2, rows, seq), generator=generator)
            ignored = torch.rand(rows, seq, generator=generator) < 0.2
            ignored[0] = False  # so that there is a gradient
            segment_ids = (torch.arange(seq) < torch.tensor(self.lengths)[:, None]).to(torch.int64)
            steps.append({"tokens": tokens, "targets": targets.masked_fill(ignored, -100), "segment_ids": segment_ids})
        balance = init_balance(config)
        balance[:, : self.idle] = -100.0
        params = init(config, seed=self.seed)
        return Problem(
            config,
            doubled(params) if config.dtype == torch.float64 else params,
            steps,
            self.rows,
            self.accumulate,
            self.optimizer,
            self.recipes,
            self.order,
            self.prefetch,
            self.again,
            balance,
            self.expert_parts,
        )


@st.composite
def problems(draw: st.DrawFn) -> Drawn:
    """Among them ranks without a row, and rows of padding alone."""
    mesh = draw(st.sampled_from(ALL_MESHES))
    config = draw(configs(mesh[1]))
    accumulate = draw(st.integers(1, 2))
    rows = (accumulate, *(accumulate * draw(st.integers(0, 2)) for _ in range(math.prod(mesh) - 1)))
    seq = draw(st.integers(2, 6))
    return Drawn(
        config=config,
        mesh=mesh,
        rows=rows,
        lengths=(seq, *(draw(st.integers(0, seq)) for _ in range(sum(rows) - 1))),
        idle=draw(st.integers(0, config.num_experts - config.num_experts_per_tok)),
        seed=draw(st.integers(0, 999)),
        accumulate=accumulate,
        # Adam and Muon make something of what is nothing but rounding: they are held to it in float64.
        optimizer=draw(st.sampled_from(["muon", "sgd"])) if config.dtype == torch.float64 else "sgd",
        recipes=draw(schedules(config)),
        order=draw(st.sampled_from(["depth_first", "layer_major"])),
        prefetch=draw(st.integers(0, 2)),
        again=draw(st.booleans()),
        expert_parts=draw(st.integers(1, 3)),
    )


def check_invariant(drawn: Drawn) -> None:
    event(f"{math.prod(drawn.mesh)} ranks")
    problem = drawn.problem()
    expected = run_steps(problem)
    for counts, batch in zip(expected.counts, problem.batches, strict=True):
        tokens = int((batch["segment_ids"] != 0).sum())
        assert counts.sum(-1).tolist() == [tokens * problem.config.num_experts_per_tok] * len(counts)
        assert not counts[:, : drawn.idle].any()
    for found in on_ranks(problem, drawn.mesh):
        assert_equal(found, expected)


@settings(max_examples=10, deadline=None)
@given(drawn=problems())
def test_any_two_steps_equal_those_of_one_process(drawn: Drawn) -> None:
    check_invariant(drawn)


@pytest.mark.nightly
@settings(max_examples=400, deadline=None)
@given(drawn=problems())
def test_four_hundred_of_any_two_steps(drawn: Drawn) -> None:
    check_invariant(drawn)


def drawn_in_parts(sizes: tuple[int, int, int]) -> Any:
    config = dataclasses.replace(CONFIG, num_experts=12 if sizes[0] * sizes[1] == 4 else 6)
    mesh = parallel.make_mesh(*sizes)
    return config, parallel.unshard(init(config, seed=3, layout=model_layout(config, mesh)))


@pytest.mark.parametrize("mesh", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_initial_values_do_not_depend_on_the_mesh(mesh: tuple[int, int, int]) -> None:
    for config, found in parallel.shared_pool().run(drawn_in_parts, mesh[0] * mesh[1] * mesh[2], mesh):
        torch.testing.assert_close(found, init(config, seed=3), rtol=0, atol=0)


# --- what went wrong elsewhere ---


def silent(config: MoEConfig) -> Any:
    """Parameters of one layer that adds nothing: the state of token i is the unit vector e_i to the end."""
    params = pytree.tree_map(torch.zeros_like, doubled(init(config, seed=0)))
    (layer,) = params["layers"]
    for scale in (layer["attention_norm"], layer["mlp_norm"], params["final_norm"]):
        scale.fill_(1.0)
    params["embedding"].copy_(torch.eye(config.vocab_size, config.hidden_size))
    return params


TWO_EXPERTS = MoEConfig(
    vocab_size=5,
    hidden_size=5,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    num_experts=2,
    num_experts_per_tok=1,
    norm_topk_prob=False,
    moe_intermediate_size=3,
    balance_update_rate=0.3,
    compute_dtype="float64",
)
NORMED = 1 / math.sqrt(1 / TWO_EXPERTS.hidden_size + TWO_EXPERTS.rms_norm_eps)
"""What rms_norm makes of the 1 in a unit vector."""


def two_losses() -> Problem:
    """Token 0 is predicted at 2 nats, once; token 1 at 10 nats, nine times. The last two rows are of padding."""
    config, params = TWO_EXPERTS, silent(TWO_EXPERTS)
    for token, nats in ((0, 2.0), (1, 10.0)):
        # One target among five, the others alike: -log softmax is log(1 + 4 exp(-logit)).
        params["head"][token, 2] = -math.log(math.expm1(nats) / 4) / NORMED
    tokens = torch.tensor([[0] * 5, [0] * 5, [1] * 5, [1] * 5, [0] * 5, [0] * 5])
    targets = torch.full_like(tokens, 2)
    targets[0, 1:], targets[1], targets[3, 4] = -100, -100, -100
    segment_ids = torch.ones_like(tokens)
    segment_ids[4:] = 0
    return Problem(config, params, [{"tokens": tokens, "targets": targets, "segment_ids": segment_ids}])


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ((2, 1, 1), (2, 4)),
        ((1, 2, 1), (2, 4)),
        ((3, 1, 1), (2, 2, 2)),
        ((1, 1, 3), (2, 2, 2)),
        ((2, 2, 1), (2, 2, 2, 0)),
    ],
    ids=str,
)
def test_a_mean_of_means_is_not_taken(mesh: Mesh, rows: tuple[int, ...]) -> None:
    # torchtitan PR 4167, transformers 35203: (loss sum, tokens) = (2, 1), (90, 9) is 9.2, not 6.0; the third rank has
    # nothing to predict, nor one of the first's microbatches.
    problem = two_losses()._replace(rows=rows)
    expected = run_steps(problem)
    for found in all_on_ranks([problem, problem._replace(accumulate=2)], mesh):
        for outcome in found:
            assert float(outcome.metrics[0].loss) == pytest.approx(9.2, rel=1e-12)
            assert all(bool(leaf.isfinite().all()) for leaf in outcome.gradients[0].values())
            assert_equal(outcome, expected, 1e-6)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 6, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_an_experts_gradient_is_independent_of_ep(mesh: Mesh) -> None:
    # pytorch 160285, torchtitan PR 1551, Megatron PR 5956: it was ep times too large; pytorch PR 167178: also where ep
    # is the world's size, and the FSDP degree 1.
    problem = Problem(CONFIG, doubled(init(CONFIG, seed=1)), batches(CONFIG, 7)[:1])
    (expected,) = run_steps(problem).gradients
    for found in on_ranks(problem, mesh):
        for layer in (1, 2):
            for matrix in ("gate_up", "down"):
                ours, theirs = (one[f"layers.{layer}.experts.{matrix}"] for one in (found.gradients[0], expected))
                assert ours.flatten(1).norm(dim=1).min() > 0
                ratio = ours.flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
                torch.testing.assert_close(ratio, torch.ones(6, dtype=torch.float64), rtol=1e-9, atol=0)
        # The norm that is reported is that of all of them, each once (DeepSpeed 8475, Megatron PR 5916).
        whole = torch.stack([leaf.norm() for leaf in found.gradients[0].values()]).norm()
        torch.testing.assert_close(found.metrics[0].grad_norm.double(), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)], ids=str)
def test_a_router_has_its_gradient_without_any_coefficient(mesh: Mesh) -> None:
    # torchtitan PR 2532, transformers 48687: lost where a DTensor became local, but for what came by the balance loss.
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    problem = Problem(config, doubled(init(config, seed=1)), batches(config, 5)[:1])
    (expected,) = run_steps(problem).gradients
    for found in on_ranks(problem, mesh):
        for name in ("layers.1.router", "layers.2.router", "layers.1.shared_gate"):
            assert expected[name].norm() > 1e-4
            torch.testing.assert_close(found.gradients[0][name], expected[name], rtol=1e-9, atol=1e-12)


def balanced(coefficient: float, times: int = 1, accumulate: int = 1) -> Problem:
    config = dataclasses.replace(CONFIG, router_aux_loss_coef=coefficient, router_z_loss_coef=0.0)
    batch = {key: torch.cat([value] * times) for key, value in batches(config, 4)[0].items()}
    return Problem(config, doubled(init(config, seed=1)), [batch], accumulate=accumulate)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_the_auxiliary_loss_scales_with_nothing_but_its_coefficient(mesh: Mesh) -> None:
    # Megatron PR 3769: neither with ranks, nor with microbatches, nor with the same batch twice.
    close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    none, once = (run_steps(balanced(c)).gradients[0]["layers.1.router"] for c in (0.0, 0.1))
    assert (once - none).norm() > 1e-3
    ways = [(times, accumulate) for times in (1, 2) for accumulate in (1, 2)]
    for found in all_on_ranks([balanced(c, *way) for way in ways for c in (0.1, 0.2)], mesh):
        gradients = [one.gradients[0]["layers.1.router"] for one in found]
        for with_coefficient, with_its_double in zip(gradients[::2], gradients[1::2], strict=True):
            close(with_coefficient, once)
            close(with_its_double - none, 2 * (once - none))


def four_tokens(recipe: str, ranks: int, zero_router: bool) -> Problem:
    """Three tokens choose expert 0 and one expert 1, each in a row of its own beside padding; four microbatches."""
    problem = two_losses()
    if not zero_router:
        problem.params["layers"][0]["router"][:2] = torch.eye(2)
    empty = 4 * ranks - 4
    tokens = torch.tensor([[0, 2], [1, 2], [0, 2], [0, 2]] + [[2, 2]] * empty)
    segment_ids = torch.tensor([[1, 0]] * 4 + [[0, 0]] * empty)
    batch = {"tokens": tokens, "targets": torch.full_like(tokens, 2), "segment_ids": segment_ids}
    order = torch.arange(4 * ranks).view(4, ranks).t().flatten()  # so that each rank has some
    return problem._replace(
        batches=[{key: value[order] for key, value in batch.items()}] * 2,
        accumulate=4,
        recipes=schedule_of(problem.config, recipe),
        balance=torch.tensor([[0.1, 0.0]]) if zero_router else None,
    )


@pytest.mark.parametrize("zero_router", [False, True])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 1)], ids=str)
def test_the_balance_moves_once_whatever_is_recomputed(mesh: Mesh, zero_router: bool) -> None:
    # torchtitan 1304, 1593, 4494: counts [3, 1] move it by [-0.3, 0.3], with accumulation 4 and recomputation on.
    # torchtitan 1117, 3336: where all scores tie, replays choose what was chosen; the bias alone decides.
    problems = [four_tokens(recipe, math.prod(mesh), zero_router) for recipe in RECIPES]
    expected = run_steps(problems[0])
    counts, balance = ([[[4, 0]], [[0, 4]]], [[0.1, 0.0]]) if zero_router else ([[[3, 1]]] * 2, [[-0.6, 0.6]])
    for found in all_on_ranks(problems, mesh):
        for outcome in found:
            assert_equal(outcome, expected)
            assert [counted.tolist() for counted in outcome.counts] == counts
            torch.testing.assert_close(outcome.state.balance, torch.tensor(balance))
