"""Rematerialisation inside ``torch.func``, where ``torch.utils.checkpoint`` raises.

    python examples/remat_under_torch_func.py

A stack of plain torch blocks, nothing of this project in them, is differentiated with and without ``memory.remat``: the
same gradient bit for bit, in less memory. One of the values inside is named, and may be kept: then it is not computed a
second time. Per-example gradients and Hessian-vector products compose with it.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from functional_moe import memory
from functional_moe.commands.program import end, read_flags

HEADS, WIDTH, SEQUENCES, TOKENS = 4, 64, 4, 128
SHAPES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
Block = Callable[[dict[str, Tensor], Tensor], Tensor]


def block(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """[sequences, tokens, WIDTH] to the same: attention, then a GELU network."""
    q, k, v = (F.layer_norm(x, (WIDTH,)) @ weights["qkv"]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    attended = memory.name(torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v, "attended")
    x = x + attended.transpose(1, 2).flatten(-2) @ weights["out"]
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ weights["up"]) @ weights["down"]


def loss(block: Block, layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    """Of the whole stack."""
    for weights in layers:
        x = block(weights, x)
    return x.square().mean()


def compare(a: object, b: object) -> str:
    """In words: two trees of tensors."""
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    apart = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    return "equal bit for bit" if all(torch.equal(x, y) for x, y in pairs) else f"{apart:.0e} apart"


def main() -> None:
    depth = read_flags(__doc__, layers=8).layers
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    layers = [{key: draw(shape) / shape[0] ** 0.5 for key, shape in SHAPES.items()} for _ in range(depth)]
    x = draw((SEQUENCES, TOKENS, WIDTH))

    def gradient(block: Block) -> list[dict[str, Tensor]]:
        return torch.func.grad(lambda layers: loss(block, layers, x))(layers)

    try:
        gradient(functools.partial(checkpoint, block, use_reentrant=False))
    except RuntimeError as error:
        print(f"torch.utils.checkpoint under torch.func.grad: {str(error).split('. ')[0]}")
    expected, forms = gradient(block), {"plain": block, "remat": memory.remat(block)}
    for form, function in {**forms, "remat, attention kept": memory.remat(block, save=("attended",))}.items():
        with memory.LiveBytes() as tensors:
            found = gradient(function)
        print(f"grad, {form}: {tensors.peak / 2**20:.1f} MiB, {compare(found, expected)}")

    def per_example(block: Block) -> object:
        return torch.func.vmap(torch.func.grad(lambda w, row: loss(block, w, row[None])), (None, 0))(layers, x)

    def curvature(block: Block) -> object:
        return torch.func.jvp(torch.func.grad(lambda w: loss(block, w, x)), (layers,), (layers,))[1]

    print(f"vmap of grad: {compare(*map(per_example, forms.values()))}")
    print(f"jvp of grad: {compare(*map(curvature, forms.values()))}")


if __name__ == "__main__":
    end(main)
