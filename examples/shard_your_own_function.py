"""A function of your own over ranks, and the property that sharding changes nothing. Needs Hypothesis.

    python examples/shard_your_own_function.py

The function is a contrastive loss as of CLIP (arXiv 2103.00020): each image must find its text among those of all
ranks. Gathered with their gradient, which many forget, it equals the same function on one process: values, gradients
and placements, on any mesh, for any placements of the weights and any number of rows. The mistake is tried too.
"""

import functools

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from functional_moe import parallel
from functional_moe.commands.program import end, needs, read_flags

with needs("test"):
    from hypothesis import given, settings, strategies

    from functional_moe.parallel.testing import any_placements, assert_equivalent, meshes

IMAGE, TEXT, SHARED = 5, 7, 3  # features; no number of ranks divides them


def contrastive_loss(shards: dict, layout: parallel.Layout, *, gradient_of_others: bool = True) -> Tensor:
    """Mean over image-text pairs, of which this rank returns its own rows' summand.

    Args:
      shards: ``weights`` in any placements; ``image`` [rows, IMAGE] and ``text`` [rows, TEXT], rows over all ranks.
      layout: of the whole.
      gradient_of_others: False for the mistake: other ranks' texts are constants.
    """
    weights, pairs = parallel.gather(shards["weights"], layout["weights"]), layout["text"].shapes[0]
    image, text = (torch.nn.functional.normalize(shards[name] @ weights[name], dim=-1) for name in ("image", "text"))
    rows = parallel.make_layout(layout.mesh, layout["text"].placements, torch.empty(pairs, SHARED, device="meta"))
    own = torch.arange(pairs)[parallel.held(rows, rows.placements, rows.shapes)[0]]
    everyone = parallel.gather(text if gradient_of_others else text.detach(), rows)
    if not gradient_of_others:
        everyone = everyone.index_copy(0, own, text)
    logits = torch.exp(weights["scale"]) * image @ everyone.mT
    return torch.nn.functional.cross_entropy(logits, own, reduction="sum") / pairs


def make_inputs(pairs: int) -> dict:
    """Weights and pairs, no two numbers alike."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(pairs), dtype=torch.float64)
    weights = {"image": draw(IMAGE, SHARED), "text": draw(TEXT, SHARED), "scale": draw(1)}
    return {"weights": weights, "image": draw(pairs, IMAGE), "text": draw(pairs, TEXT)}


def place(weights: dict) -> dict:
    """Placements of all inputs, from those of the weights: rows are split over all ranks."""
    return {"weights": weights, "image": (Shard(0), Shard(0)), "text": (Shard(0), Shard(0))}


def main() -> None:
    examples, ranks, placed = read_flags(__doc__, examples=40).examples, set(), set()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(mesh=meshes(), pairs=strategies.integers(1, 9), weights=any_placements(make_inputs(1)["weights"]))
    def sharding_changes_nothing(mesh: dict, pairs: int, weights: dict) -> None:
        assert_equivalent(contrastive_loss, make_inputs(pairs), place(weights), [mesh], rtol=1e-12)
        ranks.add(mesh["fsdp"] * mesh["ep"])
        placed.add(str(weights))

    sharding_changes_nothing()
    print(f"equal to one process within 1e-12: on {sorted(ranks)} ranks, {len(placed)} placements of the weights")
    try:
        wrong = functools.partial(contrastive_loss, gradient_of_others=False)
        split = dict.fromkeys(("image", "text", "scale"), (Shard(0), Shard(0)))
        assert_equivalent(wrong, make_inputs(6), place(split), [{"fsdp": 2, "ep": 1}])
    except AssertionError as error:
        print(f"with a gather that has no gradient:\n{error}")


if __name__ == "__main__":
    end(main)
