"""A transformation applied bucket by bucket is the transformation applied to the whole."""

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_moe import optim

BUCKETS = {"first": "one", "layers": ("two", "three"), "last": "one"}
AXES = optim.MatrixAxes(-1, -2)


def layer():
    # Matrices of whole vectors (32 elements): products of others may round by where they lie in memory.
    return {"matrix": torch.randn(8, 12), "stack": torch.randn(3, 8, 4), "norm": torch.randn(8)}


def make_params(seed=0):
    torch.manual_seed(seed)
    return {"first": torch.randn(5, 8), "layers": (layer(), layer()), "last": {"norm": torch.randn(8)}}


LAYER = {"matrix": "matrix", "stack": "matrix", "norm": "rest"}
LABELS = {"first": "rest", "layers": (LAYER, LAYER), "last": {"norm": "rest"}}


def by_label():
    return optim.partition({"matrix": optim.muon(0.02, AXES, weight_decay=0.1), "rest": optim.adamw(0.01)}, LABELS)


DECAYED = pytree.tree_map(lambda label: label == "matrix", LABELS)
TRANSFORMS = {
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "plain sgd": lambda: optim.sgd(0.1),
    "adamw": lambda: optim.adamw(optim.linear_schedule(0.1, 0.0, 10), weight_decay=0.1, mask=DECAYED),
    "lion": lambda: optim.lion(0.01),
    "partition": by_label,
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), by_label()),
    "accumulated": lambda: optim.accumulate(optim.adamw(0.1), 2),
    "masked": lambda: optim.chain(optim.clip_by_global_norm(1e9), optim.masked(optim.lion(0.1), DECAYED)),
}


def step_in_buckets(buckets, grads, state, params, order):
    norm, old = optim.global_norm(grads), buckets.split(state)
    own, updates, known = {}, {}, None
    for name in order:
        part = buckets.select(params, name)
        done = buckets.update(name, buckets.select(grads, name), old.own[name], old.shared, part, norm)
        own[name] = done.state
        updates |= dict(pytree.tree_flatten_with_path(done.updates)[0])
        if known is not None:
            buckets.check_shared(known, done.shared)
        known = done.shared
    return updates, buckets.join(own, known)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(TRANSFORMS)), st.permutations(["one", "two", "three"]), st.integers(0, 99))
def test_buckets_together_are_the_whole_bit_for_bit(name, order, seed):
    params, transform = make_params(seed), TRANSFORMS[name]()
    buckets = optim.Buckets(transform, BUCKETS, params)
    assert buckets.names == ("one", "two", "three")
    state = whole_state = transform.init(params)
    for _ in range(3):
        grads = pytree.tree_map(torch.randn_like, params)
        kept = pytree.tree_map(torch.clone, state)
        expected, whole_state = transform.update(grads, whole_state, params)
        updates, new = step_in_buckets(buckets, grads, state, params, order)
        # Nothing that was given is changed.
        assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(kept)))
        state = new
        assert pytree.tree_structure(state) == pytree.tree_structure(whole_state)
        assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(whole_state)))
        for path, leaf in pytree.tree_flatten_with_path(expected)[0]:
            assert torch.equal(updates[path], leaf), path
        params = optim.apply_updates(params, expected)


def test_counts_and_rates_are_shared_and_nothing_else():
    params = make_params()
    transform = TRANSFORMS["clipped"]()
    buckets = optim.Buckets(transform, BUCKETS, params)
    state = transform.init(params)
    own, shared = buckets.split(state)
    assert all(leaf.dim() == 0 for leaf in shared)
    sizes = {name: sum(leaf.numel() for leaf in leaves) for name, leaves in own.items()}
    # AdamW's two moments of the embedding and the norm; Muon's one of matrices and AdamW's two of a norm.
    assert sizes == {"one": 2 * (40 + 8), "two": 96 + 96 + 16, "three": 96 + 96 + 16}
    assert optim.learning_rates(buckets.join(own, shared)) == optim.learning_rates(state)


@pytest.mark.parametrize(
    "transform",
    [
        optim.chain(optim.add_decayed_weights(0.1), optim.clip_by_global_norm(1.0)),
        optim.masked(optim.clip_by_global_norm(1.0), DECAYED),
        optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1), optim.clip_by_global_norm(1.0)),
    ],
    ids=["of what was changed", "of a part", "of updates"],
)
def test_a_clip_of_anything_but_the_whole_gradient_is_refused(transform):
    params = make_params()
    buckets = optim.Buckets(transform, BUCKETS, params)
    grads = pytree.tree_map(torch.ones_like, params)
    with pytest.raises(ValueError, match="can only clip the whole gradient, before anything changes it"):
        step_in_buckets(buckets, grads, transform.init(params), params, ["two"])
    # Outside of buckets the same clips as always.
    transform.update(grads, transform.init(params), params)


def test_values_that_buckets_disagree_about_are_refused():
    def init(params):
        return torch.zeros((), device="meta" if pytree.tree_leaves(params)[0].is_meta else "cpu")

    transform = optim.GradientTransformation(init, lambda u, s, p=None, /: (u, s + optim.global_norm(u)))
    params = make_params()
    buckets = optim.Buckets(transform, BUCKETS, params)
    with pytest.raises(ValueError, match=r"'<root>' is .* after one bucket and .* after another: .* not per leaf"):
        step_in_buckets(buckets, params, transform.init(params), params, ["one", "two"])


def test_a_state_leaf_of_some_buckets_is_refused():
    def init(params):
        # One sum for all matrices, which only some buckets have.
        matrices = [leaf for leaf in pytree.tree_leaves(params) if leaf.dim() == 3]
        return {"sum": torch.zeros(3)} if matrices else {}

    transform = optim.GradientTransformation(init, lambda updates, state, params=None, /: (updates, state))
    with pytest.raises(ValueError, match=r"leaf 'sum' is of the buckets \['two', 'three'\]; expected one, or all"):
        optim.Buckets(transform, BUCKETS, make_params())


def test_a_bucket_for_no_leaf_or_a_foreign_state_is_refused():
    params, transform = make_params(), optim.adamw(0.1)
    with pytest.raises(ValueError, match=r"layers|Node arity|structure"):
        optim.Buckets(transform, {"first": "one", "layers": ("two",), "last": "one"}, params)
    buckets = optim.Buckets(transform, BUCKETS, params)
    with pytest.raises(ValueError, match="the state"):
        buckets.split(optim.sgd(0.1, momentum=0.9).init(params))
