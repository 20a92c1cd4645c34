"""The one declaration of every parameter, and what follows from it.

``declare(config)`` gives a tree of ``Leaf``: shape, logical axes, initializer and optimizer label. The abstract
tree, the initial values, the labels and the counts are all read off it; nothing is declared twice.

The tree::

    embedding                        [vocab, hidden]
    layers.I.attention_norm          [hidden]
    layers.I.attention.{qkv,o}       [in, out], and qkv_bias, o_bias [out], q_norm, k_norm [head_dim], or all heads
    layers.I.mlp_norm                [hidden]
    layers.I.mlp.{gate_up,down}      [in, out]               in dense layers
    layers.I.router                  [hidden, experts]       in MoE layers, as are the rest
    layers.I.experts.{gate_up,down}  [experts, in, out]
    layers.I.shared.{gate_up,down}   [in, out], and shared_gate [hidden, 1]
    final_norm                       [hidden]
    head                             [hidden, vocab]         unless tied to the embedding

Weights stand as ``[in, out]`` and are applied as ``x @ weight``. Matrices that read the same input stand side by side
in one leaf (q | k | v, gate | up), so that one product serves them; ``Leaf.blocks`` says where they part.
Hugging Face's files hold matrices as ``[out, in]``, each block in a tensor of its own: ``Leaf.names``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .config import MoEConfig
from .optim import MatrixAxes
from .parallel import Layout, from_local, held, map_leaves

Label = Literal["matrix", "embedding", "router", "vector"]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Normal:
    """Independent normal values of mean 0."""

    std: float


@dataclasses.dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What is declared of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical name of each axis; placements are rules from these names to mesh axes."""
    initializer: Normal | Constant
    label: Label
    """Which optimizer the leaf goes to: ``matrix`` is what Muon is made for."""
    blocks: tuple[int, ...] = ()
    """Widths of the matrices that stand side by side along the last axis, when there are several."""
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] = ()
    """Names in Hugging Face's files: one for each block, with ``{layer}`` and ``{expert}`` to be filled in."""
    stack_name: str = ""
    """Name of the tensor that holds the blocks of all experts together in newer files, [experts, out, in]."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"Leaf: {len(self.axes)} axes {self.axes} for shape {self.shape}")
        if self.blocks and sum(self.blocks) != self.shape[-1]:
            raise ValueError(f"Leaf: blocks {self.blocks} do not add up to the last axis of shape {self.shape}")
        if self.names and len(self.names) != len(self.blocks or (0,)):
            raise ValueError(f"Leaf: {len(self.names)} names {self.names} for {len(self.blocks or (0,))} blocks")

    @property
    def is_transposed(self) -> bool:
        """Whether Hugging Face's files hold it as ``[..., out, in]``: all but vectors and the embedding."""
        return len(self.shape) > 1 and self.axes[0] != "vocab"


def declare(config: MoEConfig) -> Params:
    """The declaration of every parameter of ``config``: a tree of ``Leaf``."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tree: Params = {
        "embedding": Leaf(
            (vocab, hidden),
            ("vocab", "hidden"),
            Normal(config.initializer_range),
            "embedding",
            names=("model.embed_tokens.weight",),
        ),
        "layers": tuple(_layer(config, layer) for layer in range(config.num_hidden_layers)),
        "final_norm": _scale(hidden, "hidden", "model.norm"),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Leaf(
            (hidden, vocab),
            ("hidden", "vocab"),
            Normal(config.initializer_range),
            "embedding",
            names=("lm_head.weight",),
        )
    return tree


def _scale(size: int, axis: str, name: str) -> Leaf:
    return Leaf((size,), (axis,), Constant(1.0), "vector", names=(f"{name}.weight",))


def _layer(config: MoEConfig, layer: int) -> Params:
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.attention_head_dim
    keys = config.num_key_value_heads * config.attention_head_dim
    into = Normal(config.initializer_range)
    # What is added to the residual stream starts smaller the more there is to add (GPT-2's rule).
    back = Normal(config.initializer_range / math.sqrt(2 * config.num_hidden_layers))

    at = "model.layers.{layer}"
    qkv = tuple(f"{at}.self_attn.{matrix}_proj" for matrix in "qkv")
    fused, blocks = queries + 2 * keys, (queries, keys, keys)
    attention: Params = {
        "qkv": Leaf(
            (hidden, fused), ("hidden", "qkv"), into, "matrix", blocks, names=tuple(f"{name}.weight" for name in qkv)
        ),
        "o": Leaf((queries, hidden), ("heads", "hidden"), back, "matrix", names=(f"{at}.self_attn.o_proj.weight",)),
    }
    if config.attention_bias:
        names = tuple(f"{name}.bias" for name in qkv)
        attention["qkv_bias"] = Leaf((fused,), ("qkv",), Constant(0.0), "vector", blocks, names=names)
    if config.attention_output_bias:
        names = (f"{at}.self_attn.o_proj.bias",)
        attention["o_bias"] = Leaf((hidden,), ("hidden",), Constant(0.0), "vector", names=names)
    if config.use_qk_norm:
        whole = config.qk_norm_over_heads
        for matrix, size in (("q", queries), ("k", keys)):
            attention[f"{matrix}_norm"] = _scale(
                size if whole else config.attention_head_dim,
                "heads" if whole else "head_dim",
                f"{at}.self_attn.{matrix}_norm",
            )

    def feed_forward(width: int, axis: str, name: str) -> Params:
        return {
            "gate_up": Leaf(
                (hidden, 2 * width),
                ("hidden", f"{axis}_gate_up"),
                into,
                "matrix",
                blocks=(width, width),
                names=(f"{at}.{name}.gate_proj.weight", f"{at}.{name}.up_proj.weight"),
            ),
            "down": Leaf((width, hidden), (axis, "hidden"), back, "matrix", names=(f"{at}.{name}.down_proj.weight",)),
        }

    tree: Params = {
        "attention_norm": _scale(hidden, "hidden", f"{at}.input_layernorm"),
        "attention": attention,
        "mlp_norm": _scale(hidden, "hidden", f"{at}.post_attention_layernorm"),
    }
    if not config.is_moe_layer(layer):
        tree["mlp"] = feed_forward(config.intermediate_size, "intermediate", "mlp")
        return tree
    tree["router"] = Leaf(
        (hidden, config.num_experts), ("hidden", "router"), into, "router", names=(f"{at}.mlp.gate.weight",)
    )
    expert = feed_forward(config.moe_intermediate_size, "expert_intermediate", "mlp.experts.{expert}")
    tree["experts"] = {
        matrix: dataclasses.replace(
            leaf,
            shape=(config.num_experts, *leaf.shape),
            axes=("experts", *leaf.axes),
            stack_name=f"{at}.mlp.experts.{matrix}_proj",
        )
        for matrix, leaf in expert.items()
    }
    if config.num_shared_experts:
        tree["shared"] = feed_forward(config.shared_intermediate_size, "intermediate", "mlp.shared_experts")
        if config.shared_expert_gate:
            names = (f"{at}.mlp.shared_expert_gate.weight",)
            tree["shared_gate"] = Leaf((hidden, 1), ("hidden", "one"), into, "router", names=names)
    return tree


def _map(function: Callable[[Leaf], Any], config: MoEConfig) -> Params:
    tree = pytree.tree_map(function, declare(config), is_leaf=lambda node: isinstance(node, Leaf))
    return tree  # type: ignore[no-any-return]


def abstract(config: MoEConfig) -> Params:
    """The parameter tree on ``meta``: shapes and dtypes without memory."""
    return _map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), config)


def labels(config: MoEConfig) -> Params:
    """The optimizer label of every leaf, for ``optim.partition``."""
    return _map(lambda leaf: leaf.label, config)


def matrix_axes(config: MoEConfig) -> Params:
    """Where the matrices lie in every leaf, for ``optim.muon``: ``x @ weight`` has its inputs on axis -2."""
    return _map(lambda leaf: MatrixAxes(out=-1, in_=-2, out_blocks=leaf.blocks or 1), config)


def count_parameters(config: MoEConfig, *, active: bool = False) -> int:
    """How many numbers the parameter tree holds; with ``active``, those that one token meets."""
    total = 0
    for leaf in pytree.tree_leaves(declare(config), is_leaf=lambda node: isinstance(node, Leaf)):
        size = math.prod(leaf.shape)
        if active and "experts" in leaf.axes:
            size = size // config.num_experts * config.num_experts_per_tok
        total += size
    return total


def init(
    config: MoEConfig, seed: int, device: torch.device | str | None = None, layout: Layout | None = None
) -> Params:
    """Initial parameters, fp32.

    Every matrix is drawn from its own seed, made of ``seed``, the leaf's path and, in an expert stack, the
    expert's number. So the values depend on nothing but those: not on the order of drawing, the mesh, the
    placement or the world size; and a rank that holds some experts draws those alone.

    Args:
      config: the model.
      seed: any integer.
      device: where the result lies; by default the CPU, or the mesh's device. The numbers are always drawn on the CPU,
        so that they are the same anywhere.
      layout: where each rank's part lives; then the leaves are DTensors. By default they are whole.

    Raises:
      ValueError: for a layout of other shapes; the leaf is named.
    """
    device = device or ("cpu" if layout is None else layout.mesh.device_type)

    def draw(path: str, leaf: Leaf, *placed: Any) -> Tensor:
        part = tuple(slice(0, size) for size in leaf.shape) if layout is None else held(layout, *placed)
        shape = tuple(one.stop - one.start for one in part)
        if isinstance(leaf.initializer, Constant):
            return torch.full(shape, leaf.initializer.value, dtype=leaf.dtype, device=device)
        std = leaf.initializer.std
        if leaf.axes[0] != "experts":
            full = _normal(seed, path, leaf.shape, std, leaf.dtype)
            return full[part].clone(memory_format=torch.contiguous_format).to(device)
        stack = torch.empty(shape, dtype=leaf.dtype, device=device)
        for expert, matrix in zip(range(part[0].start, part[0].stop), stack, strict=True):
            matrix.copy_(_normal(seed, f"{path}[{expert}]", leaf.shape[1:], std, leaf.dtype)[part[1:]])
        return stack

    declared = declare(config)
    if layout is None:
        return map_leaves(draw, declared, "the declaration")  # type: ignore[no-any-return]
    others = (("the placements", layout.placements), ("the layout's shapes", layout.shapes))
    return from_local(map_leaves(draw, declared, "the declaration", *others), layout)  # type: ignore[no-any-return]


def _normal(seed: int, name: str, shape: tuple[int, ...], std: float, dtype: torch.dtype) -> Tensor:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator, dtype=dtype).mul_(std)
