"""Updates layer by layer over ranks: the plain steps of one process, states streamed or not, donated or not."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_moe import memory, parallel
from functional_moe.chain import make_chain
from functional_moe.parameters import init
from functional_moe.sharding import make_sharding, model_layout
from functional_moe.train_step import init_state, make_train_step
from functional_moe.updates import at_home
from tests.parallel.test_train_step import (
    CONFIG,
    Mesh,
    Problem,
    batches,
    check_placements,
    doubled,
    in_full,
    make_optimizer,
)

ROWS = 8


def stepped(mesh: Mesh | None, optimizer: str, home: str, donate: bool) -> dict[str, Tensor]:
    """Two steps; parameters and state in full, and the losses and norms. Without a mesh the plain ones."""
    params = doubled(init(CONFIG, 0))
    layout = None if mesh is None else model_layout(CONFIG, parallel.make_mesh(*mesh))
    made = make_optimizer(Problem(CONFIG, params, [], optimizer=optimizer), layout)
    schedule = None
    if layout is not None:
        params = parallel.shard(params, layout)
        sizes = make_sharding(CONFIG, layout, None, torch.float64).layers.sizes
        chain = make_chain(CONFIG)
        homes = {layer: home for layer in chain.layers if layer != "layers.1"}
        schedule = memory.make_schedule(chain, gathers=memory.Gathers(sizes), updates=memory.Updates(homes))
    step = make_train_step(
        CONFIG,
        made,
        layout=layout,
        schedule=schedule,
        copies=memory.AdversarialCopies(1),
        donate=donate and mesh is not None,
        reduce_dtype=torch.float64,
    )
    state = init_state(params, made, CONFIG)
    if schedule is not None:
        state = state._replace(opt_state=at_home(state.params, state.opt_state, made, CONFIG, schedule))
    found: dict[str, Any] = {}
    for number, batch in enumerate(batches(CONFIG, ROWS)):
        if mesh is not None:
            batch = {key: value.chunk(dist.get_world_size())[dist.get_rank()] for key, value in batch.items()}
        given = state
        state, metrics = step(state, batch)
        found |= {f"loss {number}": metrics.loss, f"norm {number}": metrics.grad_norm}
        if donate and mesh is not None:
            with pytest.raises(RuntimeError, match="was donated to a train step"):
                given.params["embedding"].to_local()
            with pytest.raises(RuntimeError, match="was donated to a train step"):
                parallel.local_parts(given.params)
    if layout is not None:
        check_placements(state, layout)
    leaves = pytree.tree_flatten_with_path(in_full((state.params, state.opt_state, state.balance)))[0]
    return found | {pytree.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize(
    ("mesh", "optimizer", "home", "donate"),
    [
        ((2, 1, 1), "muon", memory.HOST, True),
        ((2, 1, 1), "sgd", memory.HBM, True),
        ((1, 2, 1), "muon", memory.HOST, False),
    ],
)
def test_two_steps_equal_the_plain_ones_of_one_process(mesh: Mesh, optimizer: str, home: str, donate: bool) -> None:
    expected = stepped(None, optimizer, home, donate)
    for found in parallel.shared_pool().run(stepped, 2, mesh, optimizer, home, donate):
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            # Momenta are float32 whatever the parameters are.
            torch.testing.assert_close(
                found[name], theirs, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
