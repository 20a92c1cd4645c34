"""The shape of a model, as data: ``MoEConfig`` and the named presets.

Field names are those of the Hugging Face configurations wherever one exists. Every combination that no
model can have raises ``ValueError`` at construction and names the field and its value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Literal

import torch

ScoringFunction = Literal["softmax", "sigmoid"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]

_COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A pre-norm decoder whose feed-forward halves are dense for the first layers and routed after.

    Raises:
      ValueError: at construction, for any impossible combination; the message names the field and its value.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_experts: int
    """Routed experts of each MoE layer."""
    num_experts_per_tok: int
    """Experts that each token visits (top-k)."""
    moe_intermediate_size: int
    """Inner width of one routed expert."""
    head_dim: int | None = None
    """Width of one attention head; ``hidden_size // num_attention_heads`` when not given."""
    intermediate_size: int = 0
    """Inner width of the dense feed-forward layers; needed when ``first_k_dense_replace > 0``."""
    first_k_dense_replace: int = 0
    """How many of the first layers are dense instead of routed."""

    # Attention
    max_position_embeddings: int = 8192
    """Longest sequence a batch may hold."""
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    """Share of each head that is rotated; the rest passes unchanged."""
    use_qk_norm: bool = False
    """RMSNorm over each head of the queries and keys, before the rotation."""
    qk_norm_over_heads: bool = False
    """That norm runs over all heads of a token together, each entry with a scale of its own (arXiv 2409.02060)."""
    clip_qkv: float | None = None
    """Largest magnitude of an entry of queries, keys and values, before the rotation; ``None`` is no bound."""
    attention_bias: bool = False
    """A bias on the query, key and value projections."""
    attention_output_bias: bool = False
    """A bias on the attention's output projection."""
    rms_norm_eps: float = 1e-6

    # Routing
    scoring_func: ScoringFunction = "softmax"
    norm_topk_prob: bool = True
    """Divide the chosen scores by their sum."""
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    """Groups the experts are divided into for group-limited selection (arXiv 2412.19437)."""
    topk_group: int = 1
    """Groups a token may choose experts from."""
    num_shared_experts: int = 0
    """Experts every token visits; they are held as one feed-forward layer of their summed width."""
    shared_expert_intermediate_size: int | None = None
    """Inner width of one shared expert; ``moe_intermediate_size`` when not given."""
    shared_expert_gate: bool = False
    """Scale the shared experts' output by a sigmoid of a learned projection of the token."""

    # Balance
    router_aux_loss_coef: float = 0.0
    """Weight of the balance loss of each MoE layer (sequence-wise, arXiv 2412.19437; 1.0 when uniform)."""
    router_z_loss_coef: float = 0.0
    """Weight of the squared log-sum-exp of the router logits of each MoE layer (arXiv 2202.08906)."""
    balance_update_rate: float = 0.0
    """Step of the selection bias per optimizer step (arXiv 2408.15664); 0 leaves it alone."""
    balance_centred: bool = False
    """Subtract the mean of the step over a layer's experts, so that the bias keeps its mean."""

    # Everything else
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    compute_dtype: ComputeDtype = "float32"
    """What the products run in. Parameters, routing, norms' statistics and the loss stay fp32 (or fp64)."""
    loss_chunk_size: int = 1024
    """Tokens whose logits exist at one time in the cross-entropy."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_attention()
        self._check_routing()

    def _fail(self, field: str, why: str) -> None:
        raise ValueError(f"MoEConfig.{field} = {getattr(self, field)!r}: {why}")

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int" or (field.type == "int | None" and value is not None)
            if whole and (not isinstance(value, int) or isinstance(value, bool)):
                self._fail(field.name, "must be an integer")
            number = field.type == "float" or (field.type == "float | None" and value is not None)
            if number and not (isinstance(value, int | float) and math.isfinite(value)):
                self._fail(field.name, "must be a finite number")
            if field.type == "bool" and not isinstance(value, bool):
                self._fail(field.name, "must be True or False")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "max_position_embeddings",
            "n_group",
            "topk_group",
            "loss_chunk_size",
        ):
            if getattr(self, name) < 1:
                self._fail(name, "must be at least 1")
        for name in ("rope_theta", "rms_norm_eps", "routed_scaling_factor", "initializer_range"):
            if getattr(self, name) <= 0:
                self._fail(name, "must be positive")
        for name in (
            "num_shared_experts",
            "intermediate_size",
            "router_aux_loss_coef",
            "router_z_loss_coef",
            "balance_update_rate",
        ):
            if getattr(self, name) < 0:
                self._fail(name, "must not be negative")
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            self._fail("first_k_dense_replace", f"must lie in 0..num_hidden_layers ({self.num_hidden_layers})")
        if self.first_k_dense_replace and not self.intermediate_size:
            self._fail("intermediate_size", "dense layers (first_k_dense_replace > 0) need a width")
        if self.compute_dtype not in _COMPUTE_DTYPES:
            self._fail("compute_dtype", f"must be one of {sorted(_COMPUTE_DTYPES)}")

    def _check_attention(self) -> None:
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                self._fail(
                    "num_attention_heads",
                    f"does not divide hidden_size ({self.hidden_size}); give head_dim explicitly",
                )
        elif self.head_dim < 1:
            self._fail("head_dim", "must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            self._fail("num_key_value_heads", f"must divide num_attention_heads ({self.num_attention_heads})")
        if self.qk_norm_over_heads and not self.use_qk_norm:
            self._fail("qk_norm_over_heads", "there is no norm of queries and keys (use_qk_norm = False)")
        if self.clip_qkv is not None and self.clip_qkv <= 0:
            self._fail("clip_qkv", "must be positive; None is no bound")
        if not 0 < self.partial_rotary_factor <= 1:
            self._fail("partial_rotary_factor", "must lie in (0, 1]")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            self._fail(
                "partial_rotary_factor",
                f"rotates {self.rotary_dim} entries of a head of {self.attention_head_dim}; they come in pairs, so it "
                "must be even and at least 2",
            )

    def _check_routing(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid"):
            self._fail("scoring_func", "must be 'softmax' or 'sigmoid'")
        if self.num_experts_per_tok > self.num_experts:
            self._fail("num_experts_per_tok", f"exceeds num_experts ({self.num_experts})")
        if self.num_experts_per_tok == 1 and self.norm_topk_prob:
            self._fail(
                "norm_topk_prob",
                "a single chosen score divided by itself is 1, so the router would get no gradient; "
                "set it to False for num_experts_per_tok = 1",
            )
        if self.num_experts % self.n_group:
            self._fail("n_group", f"must divide num_experts ({self.num_experts})")
        if self.topk_group > self.n_group:
            self._fail("topk_group", f"exceeds n_group ({self.n_group})")
        allowed = self.topk_group * (self.num_experts // self.n_group)
        if self.num_experts_per_tok > allowed:
            self._fail(
                "num_experts_per_tok", f"exceeds the {allowed} experts of the topk_group ({self.topk_group}) groups"
            )
        if self.shared_expert_intermediate_size is not None and self.shared_expert_intermediate_size < 1:
            self._fail("shared_expert_intermediate_size", "must be at least 1")
        if self.shared_expert_gate and not self.num_shared_experts:
            self._fail("shared_expert_gate", "there is no shared expert to gate (num_shared_experts = 0)")
        if self.shared_expert_intermediate_size is not None and not self.num_shared_experts:
            self._fail("shared_expert_intermediate_size", "there is no shared expert (num_shared_experts = 0)")
        if self.balance_centred and not self.balance_update_rate:
            self._fail("balance_centred", "the selection bias never moves (balance_update_rate = 0)")

    @property
    def dtype(self) -> torch.dtype:
        """``compute_dtype`` as torch's own type."""
        return _COMPUTE_DTYPES[self.compute_dtype]

    @property
    def rotary_dim(self) -> int:
        """Entries of each head that are rotated."""
        return int(self.attention_head_dim * self.partial_rotary_factor)

    @property
    def attention_head_dim(self) -> int:
        """``head_dim``, or what follows from the hidden size."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def shared_intermediate_size(self) -> int:
        """Inner width of all shared experts together; 0 without any."""
        return self.num_shared_experts * (self.shared_expert_intermediate_size or self.moe_intermediate_size)

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward half is routed."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def is_moe_layer(self, layer: int) -> bool:
        """Whether ``layer`` (counted from 0) is routed."""
        return layer >= self.first_k_dense_replace

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        from .parameters import count_parameters  # here, because parameters are declared from a config

        return count_parameters(self)

    @property
    def num_active_params(self) -> int:
        """Parameters one token meets: all of them except the routed experts it does not visit."""
        from .parameters import count_parameters  # here, because parameters are declared from a config

        return count_parameters(self, active=True)


PRESETS: Mapping[str, MoEConfig] = {
    # Trains on two CPU cores in a few minutes; bytes as tokens plus the document separator.
    "tiny": MoEConfig(
        vocab_size=257,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        use_qk_norm=True,
        max_position_embeddings=2048,
        router_aux_loss_coef=1e-4,
        router_z_loss_coef=1e-5,
        balance_update_rate=1e-3,
    ),
    # The published 952-billion-parameter run. Layers, experts, top-k, hidden size and vocabulary are published;
    # the attention shape and the expert width are inferred so that the published totals come out.
    "jupiter-952b": MoEConfig(
        vocab_size=262_144,
        hidden_size=6144,
        num_hidden_layers=74,
        num_attention_heads=48,
        num_key_value_heads=16,
        head_dim=128,
        num_experts=384,
        num_experts_per_tok=8,
        moe_intermediate_size=1792,
        num_shared_experts=1,
        use_qk_norm=True,
        max_position_embeddings=65_536,
        scoring_func="sigmoid",
        balance_update_rate=1e-3,
        compute_dtype="bfloat16",
    ),
}
"""Named configurations. ``jupiter-952b`` is marked inferred where its values are not published."""

INFERRED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "jupiter-952b": (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "moe_intermediate_size",
        "num_shared_experts",
        "use_qk_norm",
        "scoring_func",
        "balance_update_rate",
    )
}
"""Fields of a preset that are our inference, not a publication's statement."""


def preset(name: str) -> MoEConfig:
    """The configuration called ``name``.

    Raises:
      ValueError: no preset has this name; the message lists the nearest ones.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.3) or sorted(PRESETS)
        raise ValueError(f"unknown preset {name!r}; did you mean {' or '.join(map(repr, near))}?")
    return PRESETS[name]
