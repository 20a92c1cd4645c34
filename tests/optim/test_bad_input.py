"""Every mistake of a caller raises at construction or on the first call, with the path and the value."""

import pytest
import torch
import torch.utils._pytree as pytree

from functional_moe import optim

AXES = optim.MatrixAxes(-1, -2)
PARAMS = {"layers": [{"w": torch.ones(3, 4)}, {"w": torch.ones(3, 4)}]}


def grads_with(leaf):
    return {"layers": [{"w": torch.ones(3, 4)}, {"w": leaf}]}


OPTIMIZERS = {
    "adamw": optim.adamw(0.1),
    "lion": optim.lion(0.1),
    "sgd": optim.sgd(0.1),
    "muon": optim.muon(0.1, AXES),
    "partition": optim.partition({"x": optim.adamw(0.1)}, "x"),
    "accumulate": optim.accumulate(optim.adamw(0.1), 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (grads_with(torch.ones(4, 3)), r"'layers\.1\.w' has shape \(4, 3\).*\(3, 4\)"),
        ({"layers": [{"w": torch.ones(3, 4)}]}, r"lack the leaf 'layers\.1\.w'"),
        ({"layers": [{"w": torch.ones(3, 4)}, {"v": torch.ones(3, 4)}]}, r"leaf 'layers\.1\.v' that"),
        (grads_with(None), r"'layers\.1\.w' is None"),
        ({"layers": ({"w": torch.ones(3, 4)}, {"w": torch.ones(3, 4)})}, "have the structure"),
    ],
)
def test_gradients_of_another_tree_or_shape(name, grads, message):
    tx = OPTIMIZERS[name]
    with pytest.raises(ValueError, match=message):
        tx.update(grads, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("grads", "params"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float16, torch.bfloat16),  # its largest number is smaller
        (torch.bfloat16, torch.float16),  # its steps are wider
        (torch.int32, torch.float32),
    ],
)
def test_gradients_of_a_dtype_that_does_not_hold_the_parameters(name, grads, params):
    tx = OPTIMIZERS[name]
    tree = pytree.tree_map(lambda x: x.to(params), PARAMS)
    wrong = pytree.tree_map(lambda x: x, tree)
    wrong["layers"][1]["w"] = wrong["layers"][1]["w"].to(grads)
    with pytest.raises(ValueError, match=rf"'layers\.1\.w' has dtype {grads}.*{params}"):
        tx.update(wrong, tx.init(tree), tree)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("grads", "params"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.float64, torch.float32)],
)
def test_gradients_of_a_wider_dtype_are_welcome(name, grads, params):
    tx = OPTIMIZERS[name]
    tree = pytree.tree_map(lambda x: x.to(params), PARAMS)
    updates, _ = tx.update(pytree.tree_map(lambda x: x.to(grads), PARAMS), tx.init(tree), tree)
    same, _ = tx.update(tree, tx.init(tree), tree)  # ones, which every dtype holds
    for new, old in zip(pytree.tree_leaves(updates), pytree.tree_leaves(same), strict=True):
        assert new.dtype.itemsize >= 4
        torch.testing.assert_close(new.float(), old.float(), rtol=1e-2, atol=0)  # sgd's follow the gradients: bf16


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "muon"])
def test_missing_parameters_and_integer_leaves(name):
    tx = OPTIMIZERS[name]
    with pytest.raises(ValueError, match=f"{name}: update needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"leaf 'layers\.1\.w' is torch\.int64"):
        tx.init(grads_with(torch.ones(3, 4, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"leaf 'layers\.1\.w' is None"):
        tx.init(grads_with(None))


def test_apply_updates_and_scalings_check_too():
    with pytest.raises(ValueError, match=r"'layers\.1\.w' has shape \(3,\)"):
        optim.apply_updates(PARAMS, grads_with(torch.ones(3)))
    for scaling in (
        optim.scale_by_adam(),
        optim.scale_by_lion(),
        optim.trace(0.9),
        optim.scale_by_muon(AXES),
    ):
        with pytest.raises(ValueError, match=r"'layers\.1\.w' has shape \(3,\)"):
            scaling.update(grads_with(torch.ones(3)), scaling.init(PARAMS))
    decay = optim.add_decayed_weights(0.1)
    with pytest.raises(ValueError, match="needs the parameters"):
        decay.update(PARAMS, decay.init(PARAMS))


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (AXES, (4,), r"leaf 'block\.w' of shape \(4,\) has no matrix"),
        (optim.MatrixAxes(2, 0), (3, 4), r"leaf 'block\.w' of shape \(3, 4\) has no axis out=2"),
        (optim.MatrixAxes(0, -3), (3, 4), r"leaf 'block\.w' .* has no axis in_=-3"),
        (AXES, (0, 8), r"leaf 'block\.w' of shape \(0, 8\) has empty matrices: axis in_ has length 0"),
        (AXES, (2, 8, 0), r"leaf 'block\.w' of shape \(2, 8, 0\) has empty matrices: axis out has length 0"),
        (optim.MatrixAxes(1, -1), (3, 4), r"out=1 and in_=-1 are one axis"),
        (optim.MatrixAxes(-1, -2, out_blocks=3), (3, 4), "out_blocks=3 does not divide the axis of length 4"),
        (optim.MatrixAxes(-1, -2, out_blocks=(2, 3)), (3, 4), r"\(2, 3\) add up to 5, the axis has length 4"),
        (optim.MatrixAxes(-1, -2, in_blocks=(1, 1)), (3, 4), r"in_blocks=\(1, 1\) add up to 2"),
        ({"block": {"w": None}}, (3, 4), r"leaf 'block\.w' has no MatrixAxes"),
        ({"block": {}}, (3, 4), r"leaf 'block\.w' has no MatrixAxes"),
        ({"block": {"w": AXES, "v": AXES}}, (3, 4), r"a MatrixAxes at 'block\.v' is for no leaf"),
    ],
)
def test_axes_that_do_not_fit(axes, shape, message):
    with pytest.raises(ValueError, match=message):
        optim.muon(0.1, axes).init({"block": {"w": torch.ones(shape)}})


def test_blocks_of_shards_are_checked_when_the_leaf_is_whole():
    """With another `orthogonalize`, init may see shards; `whole` sees the truth."""
    axes = optim.MatrixAxes(-1, -2, out_blocks=3)
    tx = optim.muon(0.1, axes, orthogonalize=lambda updates, axes, whole: whole(updates, axes))
    params = {"w": torch.ones(3, 4)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="leaf 'w': out_blocks=3 does not divide"):
        tx.update(params, state, params)
    with pytest.raises(ValueError, match="has no matrix"):
        tx.init({"w": torch.ones(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.MatrixAxes(1, 1), "two axes, got 1 for both"),
        (lambda: optim.MatrixAxes(1, 0, out_blocks=0), "out_blocks must be .* got 0"),
        (lambda: optim.MatrixAxes(1, 0, in_blocks=(3, -1)), r"in_blocks must be .* got \(3, -1\)"),
        (lambda: optim.MatrixAxes(1, 0, in_blocks=()), r"got \(\)"),
        (lambda: optim.adamw(-0.1), "learning_rate must be .* got -0.1"),
        (lambda: optim.muon(float("inf"), AXES), "learning_rate must be .* got inf"),
        (lambda: optim.sgd(torch.tensor(-1.0)), "learning_rate must be .* got -1.0"),
        (lambda: optim.lion(0.1, weight_decay=-1.0), "weight_decay must be .* got -1.0"),
        (lambda: optim.adamw(0.1, b1=1.0), r"b1 must be in \[0, 1\), got 1.0"),
        (lambda: optim.adamw(0.1, b2=-0.1), r"b2 must be in \[0, 1\), got -0.1"),
        (lambda: optim.adamw(0.1, eps=-1e-8), "eps must be .* got -1e-08"),
        (lambda: optim.lion(0.1, b1=2.0), "b1 must be .* got 2.0"),
        (lambda: optim.sgd(0.1, 1.5), "decay must be .* got 1.5"),
        (lambda: optim.sgd(0.1, nesterov=True), "momentum=None"),
        (lambda: optim.muon(0.1, AXES, beta=1.0), "beta must be .* got 1.0"),
        (lambda: optim.muon(0.1, AXES, momentum="mean"), "got 'mean'"),
        (lambda: optim.muon(0.1, AXES, scale="rms"), "got 'rms'"),
        (lambda: optim.muon(0.1, AXES, momentum_dtype=torch.int32), r"got torch\.int32"),
        (lambda: optim.muon(0.1, AXES, steps=9, coefficients=optim.POLAR_EXPRESS), "9 steps need 9 triples"),
        (lambda: optim.muon(0.1, AXES, method="quick"), "got 'quick'"),
        (lambda: optim.muon(0.1, AXES, dtype=torch.int8), r"torch\.int8"),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm must be above 0, got 0.0"),
        (lambda: optim.accumulate(optim.sgd(0.1), 0), "n must be at least 1 microbatch, got 0"),
        (lambda: optim.qk_clip(0.0), "tau must be .* got 0.0"),
        (lambda: optim.qk_clip(-1.0), "tau must be .* got -1.0"),
    ],
)
def test_hyperparameters_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_negative_schedule_raises_at_init():
    with pytest.raises(ValueError, match=r"schedule at count 0 must be .* got -1.0"):
        optim.sgd(lambda count: torch.tensor(-1.0)).init(PARAMS)
