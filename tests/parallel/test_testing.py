"""The kit: right functions pass on any mesh, placement and size; each kind of mistake is caught and explained."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from functional_moe import parallel
from functional_moe.parallel.testing import any_placements, assert_equivalent, meshes, uneven_shapes

ROWS = (Shard(0), Shard(0))
EP2 = [{"fsdp": 1, "ep": 2}]
FSDP2 = [{"fsdp": 2, "ep": 1}]


def inputs(rows: int = 5, experts: int = 4, hidden: int = 3, width: int = 2) -> dict:
    """A tree of parameters and a batch, no two numbers alike."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    layer = {"experts": {"down": normal(experts, hidden, width)}, "scale": normal(hidden)}
    chosen = torch.randint(experts, (rows,), generator=generator)
    return {"params": {"layers": (layer,)}, "x": normal(rows, hidden), "expert": chosen}


def placed() -> dict:
    layer = {"experts": {"down": (Shard(1), Shard(0))}, "scale": (Replicate(), Replicate())}
    return {"params": {"layers": (layer,)}, "x": ROWS, "expert": ROWS}


OUTPUTS = {
    "loss": (Partial(), Partial()),
    "total": (Replicate(), Replicate()),
    "y": ROWS,
    "counts": (Partial(), Partial()),
}


def model(shards, layout, mistake: str = ""):
    """Rows through the experts they chose: a summand, one value for all, a shard, and integers."""
    world = parallel.axis_group(layout.mesh, "fsdp", "ep")
    many = parallel.axis_size(world) > 1
    if mistake == "not replicated" and many:
        params = {"layers": (dict(shards["params"]["layers"][0]),)}
        down = parallel.gather(shards["params"]["layers"][0]["experts"], layout["params"]["layers"][0]["experts"])
        params["layers"][0]["experts"] = down
    else:
        params = parallel.gather(shards["params"], layout["params"])
    layer = params["layers"][0]
    if mistake == "lost" and many:
        layer = {**layer, "scale": layer["scale"].detach()}
    x, down = shards["x"], layer["experts"]["down"]
    if mistake == "changed":
        shards["expert"].copy_((shards["expert"] + 1) % 4)
    y = torch.einsum("ni,nio->no", x * layer["scale"], down[shards["expert"]])
    loss = (y**2).sum()
    summed = parallel.all_reduce if mistake == "factor" else parallel.reduce_replicated
    total = summed(torch.sin(y).sum(), world)
    if mistake == "mean of means":
        loss = loss / parallel.axis_size(world)
    if mistake == "silent":
        # pytorch 148690: an in-place all_reduce is not differentiated.
        total = torch.sin(y).sum().clone()
        dist.all_reduce(total, group=world)
        loss = loss * total
    if mistake == "one rank" and parallel.axis_index(world) == 1:
        total = total + 1.0
    if mistake == "wrong rows on one" and parallel.axis_index(world) == 1:
        y = y[:1]
    if mistake == "wrong rows" and many:
        y = parallel.all_gather(y, world, 0, parallel.chunk_sizes(5, 2))
    counts = torch.bincount(shards["expert"], minlength=down.shape[0])
    if mistake == "counts":
        counts = parallel.all_reduce(counts, world)
    return {"loss": loss, "total": total, "y": y, "counts": counts}


@settings(max_examples=10, deadline=None)
@given(mesh=meshes(), shape=uneven_shapes(4), data=st.data())
def test_a_right_function_passes_whatever_the_mesh_placements_and_sizes(mesh, shape, data):
    tree = inputs(*shape)
    spread = {"params": data.draw(any_placements(tree["params"])), "x": ROWS, "expert": ROWS}
    assert_equivalent(model, tree, spread, [mesh], outputs=OUTPUTS)


def test_placements_may_depend_on_the_mesh():
    assert_equivalent(model, inputs(), lambda sizes: placed(), outputs=lambda sizes: OUTPUTS)


@pytest.mark.parametrize(
    ("mistake", "where", "messages"),
    [
        (
            "mean of means",
            EP2,
            [
                "on the mesh fsdp 1 x ep 2, against one process:",
                "output loss is 0.50 x the reference (axis ep has size 2); placements fsdp: Partial(), ep: Partial()",
            ],
        ),
        (
            "not replicated",
            FSDP2,
            ["gradient of params.layers.0.scale is not summed over axis fsdp", "fsdp: Replicate(), ep: Replicate()"],
        ),
        ("lost", FSDP2, ["gradient of params.layers.0.scale is lost: 0 everywhere, unlike the reference"]),
        ("silent", EP2, ["gradient of params.layers.0.experts.down differs"]),
        ("one rank", EP2, ["output total differs at fsdp 0, ep 1, and not the same on all ranks"]),
        ("wrong rows", EP2, ["output y has shape (5, 2) at fsdp 0, ep 0, where (5, 2) is (3, 2)"]),
        ("wrong rows on one", EP2, ["output y has shape (1, 2) at fsdp 0, ep 1, where (5, 2) is (2, 2)"]),
        ("counts", EP2, ["output counts is 2.00 x the reference (axis ep has size 2)"]),
    ],
)
def test_a_mistake_is_caught_and_explained(mistake, where, messages):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(functools.partial(model, mistake=mistake), inputs(), placed(), where, outputs=OUTPUTS)
    for message in messages:
        assert message in str(caught.value)


def test_an_input_changed_in_place_is_refused():
    changed = functools.partial(model, mistake="changed")
    with pytest.raises(parallel.WorkerError, match="in-place operation"):
        assert_equivalent(changed, inputs(), placed(), EP2, outputs=OUTPUTS)


def repeated_loss(shards, layout):
    down = parallel.gather(shards["layers"], layout["layers"])[0]["experts"]["down"]
    mine = down[parallel.axis_index(layout.mesh.get_group("ep")) :: parallel.axis_size(layout.mesh.get_group("ep"))]
    return parallel.all_reduce((mine**3).sum(), layout.mesh.get_group("ep"))


def test_an_expert_gradient_ep_times_too_large_is_named_with_its_axis():
    # pytorch 160285, torchtitan PR 1551, Megatron PR 5956.
    tree = {"layers": ({"experts": {"down": torch.randn(4, 3)}},)}
    spread = {"layers": ({"experts": {"down": (Replicate(), Shard(0))}},)}
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(repeated_loss, tree, spread, EP2, outputs=(Replicate(), Replicate()))
    assert str(caught.value).splitlines() == [
        "on the mesh fsdp 1 x ep 2, against one process:",
        "gradient of layers.0.experts.down is 2.00 x the reference (axis ep has size 2); placements fsdp: Replicate(), "
        "ep: Shard(0)",
    ]


def test_placements_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"'x' of shape \(5, 3\) cannot have the placement S\(2\)"):
        assert_equivalent(model, inputs(), {**placed(), "x": (Shard(2), Shard(0))}, EP2, outputs=OUTPUTS)
    with pytest.raises(ValueError, match="the placements lack the leaf 'x'"):
        assert_equivalent(model, inputs(), {"params": placed()["params"], "expert": ROWS}, EP2, outputs=OUTPUTS)
    with pytest.raises(ValueError, match="other axes cannot share placements"):
        assert_equivalent(model, inputs(), placed(), [*EP2, {"tp": 2}], outputs=OUTPUTS)
