"""Recomputing one function in its backward: what ``jax.checkpoint`` is to JAX, for ``torch.func``.

Inside ``torch.func.grad`` or ``vjp``, ``torch.utils.checkpoint`` raises, and so does every saved-tensor hook (pytorch
issues 122729, 146036, 141845). Here a function is a ``torch.autograd.Function`` whose backward is another one: it runs
the function again and differentiates it. Both work on plain tensors, whatever transforms are around them, so the replay
costs what plain autograd costs and gives its memory back on the way. Who differentiates the backward gets
``torch.func.vjp`` of ``torch.func.vjp``, which holds to any order, without recomputation.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from ._chain import Tree
from ._copies import Copies, Copy, HostCopies
from ._pool import aligned
from ._replay import need_output

Out = TypeVar("Out")
T = TypeVar("T")


def remat(
    function: Callable[..., Out],
    *,
    save: Sequence[str] = (),
    offload: Sequence[str] = (),
    copies: Copies | None = None,
) -> Callable[..., Out]:
    """``function``, of which nothing stays for the backward but its arguments and what is named.

    The same values and, bit for bit, the same gradients, as far as they are added up in the same order: what an
    argument gets from inside is one summand. Composes with ``torch.func.grad``, ``vjp``, ``jvp`` and ``vmap``, with
    plain autograd, with itself, and with Functions inside that have ``setup_context``.

        block = remat(block, save=("routing",), offload=("attention",))
        gradient = torch.func.grad(lambda parameters: block(parameters, x).sum())(parameters)

    What the function depends on must be its arguments, the same in the replay: a tensor from outside would lose its
    gradient, and random numbers must come from a seed that is an argument, or be named and saved. Both raise where they
    can be seen: in closures, in outputs, at the global generators. A nested ``remat`` has its own names.

    Args:
      function: pure; takes and returns trees. What is differentiated are tensors among its arguments.
      save: names, given inside by :func:`name`, that are kept.
      offload: names that are kept in the host's memory. A copy back begins when the backward needs it: only a
        schedule (:func:`make_schedule`) begins sooner.
      copies: how values get there and back; by default within the host's memory. Its slabs are used again.

    Raises:
      ValueError: for a name in both; when called, for a name that the function never gives or gives twice, for a tensor
        from outside that is being differentiated, for a draw from the global generator, and under autocast.
    """
    for names, text in ((save, "save"), (offload, "offload")):
        if isinstance(names, str):
            raise ValueError(f"{text} = {names!r}: must be a sequence of names")
    if both := sorted(set(save) & set(offload)):
        raise ValueError(f"{both} are to be saved and to be offloaded; a name has one policy")
    host = _Host(HostCopies() if copies is None else copies)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Out:
        if torch._C._are_functorch_transforms_active() and any(map(_is_transformed, _closed_over(function))):
            _refuse_outside()
        leaves, spec = pytree.tree_flatten((args, kwargs))
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def rebuilt(tensors: Sequence[Tensor]) -> Out:
            filled = list(plain)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return function(*args, **kwargs)

        trace = _Trace((*save, *offload), frozenset(offload))
        run = functools.partial(_run, rebuilt, trace)
        found = _Remat.apply(_Call(run, trace, host), *(leaves[position] for position in positions))
        out: Out = trace.rebuilt_outputs(found)
        return out

    return call


def name(value: Any, label: str) -> Any:
    """Names a value inside a function under :func:`remat`; elsewhere nothing but the value.

    A value that was kept comes back in the replay as it was, bit for bit, and its gradient goes to what the replay
    computed in its place. To leave out that computation, hand in what makes the value instead:

        out, log_sum_exp = name(lambda kept: attention(q, k, v, kept), "attention")

    It is called with ``None``, or with the value that is kept, and must return the same either way, with a gradient of
    its own: so a kernel whose backward wants its output does not run forward again.

    Args:
      value: a tree of tensors; or a function of what is kept, to such a tree.
      label: unique within the function.

    Returns:
      the value.
    """
    frame = _frames.stack[-1] if _frames.stack else None
    kept = None if frame is None else frame.enter(label)
    out = value(kept) if callable(value) else value
    if frame is None:
        return out
    if kept is not None and not callable(value):
        out = pytree.tree_map(functools.partial(_given, label), out, kept)
    frame.keep(label, out)
    return out


class _Frame:
    """The names of one run of a function: its first, when it is given nothing, or a replay."""

    def __init__(self, wanted: Sequence[str], given: dict[str, Tree] | None) -> None:
        self.wanted, self.given = wanted, given
        self.seen: list[str] = []
        self.kept: dict[str, Tree] = {}

    def enter(self, label: str) -> Tree:
        if label in self.seen:
            raise ValueError(f"the name {label!r} is given twice in one call")
        self.seen.append(label)
        return None if self.given is None else self.given.get(label)

    def keep(self, label: str, value: Tree) -> None:
        if label in self.wanted and self.given is None:
            self.kept[label] = value

    def check(self) -> None:
        if missing := [label for label in self.wanted if label not in self.seen]:
            raise ValueError(f"no value is named {missing}, which are to be kept; the function names {self.seen}")


class _Frames(threading.local):
    """The functions under ``remat`` that are running, the innermost last. Autograd has threads of its own."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []


_frames = _Frames()


def _given(label: str, value: Any, kept: Any) -> Any:
    if not isinstance(value, Tensor):
        return kept
    if value.shape != kept.shape or value.dtype != kept.dtype:
        raise ValueError(
            f"the replay gives {label!r} the shape {tuple(value.shape)} and {value.dtype}; kept were "
            f"{tuple(kept.shape)} and {kept.dtype}"
        )
    return _Given.apply(value, kept) if _is_differentiable(value) else kept


class _Given(torch.autograd.Function):
    """What was kept, with the gradient of what was computed in its place."""

    @staticmethod
    def forward(value: Tensor, kept: Tensor) -> Tensor:
        return kept.view_as(kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, value: Tensor, kept: Tensor) -> tuple[Tensor, int]:
        # Both for each member of the batch: what all share would get the sum of their gradients.
        value, kept = (_in_front(one, dim, info.batch_size) for one, dim in zip((value, kept), in_dims, strict=True))
        return _Given.apply(value, kept), 0


class _Tree(NamedTuple):
    """A tree without its tensors."""

    plain: list[Any]  # its leaves, None where a tensor is
    positions: list[int]  # of the tensors
    spec: Any

    @classmethod
    def of(cls, tree: Tree) -> tuple[_Tree, list[Tensor]]:
        leaves, spec = pytree.tree_flatten(tree)
        positions = [position for position, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        plain = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(plain, positions, spec), [leaves[position] for position in positions]

    def filled(self, tensors: Sequence[Tensor]) -> Tree:
        leaves = list(self.plain)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


class _Trace:
    """What the first run of a call left: how its trees look, and the copies on their way."""

    def __init__(self, names: tuple[str, ...], offloaded: frozenset[str]) -> None:
        self.names, self.offloaded = names, offloaded
        self.outputs: _Tree | None = None
        self.kept: dict[str, _Tree] = {}
        self.leaving: list[Copy] = []

    def rebuilt_outputs(self, tensors: Sequence[Tensor]) -> Tree:
        if self.outputs is None:
            raise RuntimeError("the function under remat did not run")
        return self.outputs.filled(tensors[: len(self.outputs.positions)])

    def rebuilt_kept(self, tensors: Sequence[Tensor]) -> dict[str, Tree]:
        rest = list(tensors)
        trees = {}
        for label, tree in self.kept.items():
            count = len(tree.positions)
            trees[label] = tree.filled(rest[:count])
            rest = rest[count:]
        return trees

    @property
    def is_offloaded(self) -> list[bool]:
        """Of each tensor that is kept."""
        return [label in self.offloaded for label, tree in self.kept.items() for _ in tree.positions]


Tensors: TypeAlias = tuple[Tensor, ...]
Run: TypeAlias = Callable[[Tensors | None, Tensors], tuple[Tensors, Tensors]]
"""``(given, inputs) -> (outputs, kept)``: the first run is given ``None``, a replay what that kept."""


class _Call(NamedTuple):
    """One call of a function under remat, as a function of tensors alone."""

    run: Run
    trace: _Trace
    host: _Host


def _run(function: Callable[[Tensors], Any], trace: _Trace, given: Tensors | None, inputs: Tensors) -> Any:
    """Of type :data:`Run`."""
    frame = _Frame(trace.names, None if given is None else trace.rebuilt_kept(given))
    _frames.stack.append(frame)
    try:
        out = function(inputs)
    finally:
        _frames.stack.pop()
    frame.check()
    outputs, tensors = _Tree.of(out)
    kept: list[Tensor] = []
    if given is None:
        trace.outputs = outputs
        for label, value in frame.kept.items():
            trace.kept[label], leaves = _Tree.of(value)
            kept += leaves
    return tuple(tensors), tuple(kept)


def _over_batch(call: _Call, dimensions: tuple[int | None, ...], given_dimensions: Any, randomness: str) -> _Call:
    """The same call for a batch: ``vmap`` of a function under remat is remat of its ``vmap``."""

    def run(given: Tensors | None, inputs: Tensors) -> Any:
        in_dims = (None if given is None else given_dimensions, dimensions)
        return torch.func.vmap(call.run, in_dims, randomness=randomness)(given, inputs)

    return call._replace(run=run)


class _Host:
    """The further tier of one function under remat. Slabs are used again: to pin one takes milliseconds."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._free: dict[tuple[int, type], list[Tensor]] = {}
        self._leaving: list[Copy] = []

    def store(self, tensors: list[Tensor], trace: _Trace) -> list[Tensor]:
        """Begins to copy ``tensors``; the copies live as long as ``trace``."""
        if not tensors:
            return []
        # The sources of the call before are given free here: their copies had this call's time.
        for copy in self._leaving:
            copy.wait()
        sizes = [aligned(tensor.numel() * tensor.element_size()) for tensor in tensors]
        # A profile's fake tensors have slabs of their own.
        free = self._free.setdefault((sum(sizes), type(tensors[0])), [])
        slab = free.pop() if free else self._copies.slab(sum(sizes))
        weakref.finalize(trace, free.append, slab)
        stored = []
        for tensor, piece in zip(tensors, slab.split(sizes), strict=True):
            flat = piece[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
            stored.append(flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride()))
        self._leaving = trace.leaving = [self._copies.start(a, b) for a, b in zip(tensors, stored, strict=True)]
        # ``data`` has a version of its own: autograd would take the copy's arrival for a change of what it saved.
        return [tensor.data for tensor in stored]

    def load(self, tensors: list[Tensor], trace: _Trace, device: torch.device) -> list[Tensor]:
        """Copies of what was stored, on ``device``."""
        for copy in trace.leaving:
            copy.wait()
        loaded = [torch.empty_like(tensor, device=device) for tensor in tensors]
        for copy in [self._copies.start(a, b) for a, b in zip(tensors, loaded, strict=True)]:
            copy.wait()
        return loaded


def _closed_over(function: Any) -> Iterator[Any]:
    """The leaves that a function has from outside, and those of the functions among them."""
    waiting, seen = [function], {id(function)}
    while waiting:
        one = waiting.pop()
        if isinstance(one, functools.partial):
            held: Any = [one.func, one.args, one.keywords]
        elif isinstance(one, types.FunctionType):
            held = [_contents(cell) for cell in one.__closure__ or ()] + [one.__defaults__, one.__kwdefaults__]
        else:
            continue
        for leaf in pytree.tree_leaves(held):
            yield leaf
            if id(leaf) not in seen:
                seen.add(id(leaf))
                waiting.append(leaf)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_transformed(leaf: Any) -> bool:
    functorch = torch._C._functorch
    return isinstance(leaf, Tensor) and functorch.is_functorch_wrapped_tensor(functorch.unwrap_if_dead(leaf))


def _generators(tensors: Tensors) -> list[bytes]:
    """The states of the global generators that a function of ``tensors`` may draw from."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with no_dispatch():  # they are real tensors, also among fake ones
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        return [state.numpy().tobytes() for state in states]


def _refuse_outside() -> NoReturn:
    raise ValueError("the function uses a tensor that is being transformed (differentiated) and is not an argument")


class _Remat(torch.autograd.Function):
    """``(call, *inputs) -> (*outputs, *kept)``."""

    @staticmethod
    def forward(call: _Call, *inputs: Tensor) -> Tensors:
        device = inputs[0].device.type if inputs else "cpu"
        if torch.is_autocast_enabled(device):
            raise ValueError("autocast is on, and would not be the same in the replay: convert inside the function")
        for copy in call.trace.leaving:
            copy.wait()
        drawn = _generators(inputs)
        # With gradients on and inputs that have none, a graph can only come from a tensor that is no argument.
        with torch.enable_grad(), need_output(True):
            outputs, kept = call.run(None, tuple(tensor.detach() for tensor in inputs))
        if any(tensor.requires_grad for tensor in outputs):
            _refuse_outside()
        if drawn != _generators(inputs):
            raise ValueError("the function draws from the global generator: its replay would draw other numbers")
        offloaded = call.trace.is_offloaded
        stored = iter(call.host.store([t for t, out in zip(kept, offloaded, strict=True) if out], call.trace))
        kept = tuple(next(stored) if out else t for t, out in zip(kept, offloaded, strict=True))
        # As tensors of their own: an output may be an input, or a value that is kept.
        return tuple(tensor.detach() for tensor in (*outputs, *kept))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call = inputs[0]
        outputs = ctx.call.trace.outputs
        ctx.count = len(outputs.positions)
        kept = output[ctx.count :]
        ctx.moving = tuple(map(_is_differentiable, output[: ctx.count]))
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept, *inputs[1:])
        ctx.save_for_forward(*kept, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        live = tuple(cotangent is not None for cotangent in cotangents[: ctx.count])
        if not any(live) or not any(needed):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        how = _How(len(saved) - len(needed), needed, live)
        found = iter(_Gradient.apply(ctx.call, how, *saved, *(one for one in cotangents if one is not None)))
        return (None, *(next(found) if need else None for need in needed))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        call, kept_count = ctx.call, len(ctx.saved_tensors) - len(tangents)

        def outputs(*tensors: Tensor) -> Tensors:
            with need_output(True):
                found = call.run(tensors[:kept_count], tensors[kept_count:])[0]
            return tuple(filter(_is_differentiable, found))

        found = iter(_jvp(outputs, call, kept_count, ctx.saved_tensors, (*(None,) * kept_count, *tangents)))
        return (*(next(found) if moves else None for moves in ctx.moving), *(None,) * kept_count)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *inputs: Tensor) -> tuple[Tensors, Any]:
        batched = _over_batch(call, in_dims[1:], 0, info.randomness)
        found = _Remat.apply(batched, *inputs)
        return found, (0,) * len(found)


class _How(NamedTuple):
    """What the tensors are that :class:`_Gradient` is given: those kept, the inputs, the cotangents."""

    given: int  # how many were kept
    needed: tuple[bool, ...]  # which inputs want a gradient
    live: tuple[bool, ...]  # which outputs have a cotangent

    def parts(self, tensors: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        end = self.given + len(self.needed)
        return tensors[: self.given], tensors[self.given : end], tensors[end:]


class _Gradient(torch.autograd.Function):
    """``(call, how, *kept, *inputs, *cotangents) -> gradients`` of the inputs that want one."""

    @staticmethod
    def forward(call: _Call, how: _How, *tensors: Tensor) -> Tensors:
        given, inputs, cotangents = how.parts(_fetched(call, how, tensors))
        leaves = tuple(tensor.detach().requires_grad_(need) for tensor, need in zip(inputs, how.needed, strict=True))
        with torch.enable_grad(), need_output(False):
            outputs, _ = call.run(given, leaves)
        pairs = [
            (output, cotangent)
            for output, cotangent in zip(_chosen(outputs, how.live), cotangents, strict=True)
            if output.requires_grad
        ]
        del outputs
        wanted = _chosen(leaves, how.needed)
        if not pairs:
            return tuple(map(torch.zeros_like, wanted))
        roots, directions = zip(*pairs, strict=True)
        del pairs
        found = torch.autograd.grad(roots, wanted, directions, materialize_grads=True)
        # As tensors of their own: a gradient may be a cotangent, or the same for two inputs.
        return tuple(gradient.detach() for gradient in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, ctx.how, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors = _on_device(_unwrapped(ctx.saved_tensors), ctx.how.given)
        # The gradient by one input depends on the others too.
        moving = ctx.needs_input_grad[2:]

        def gradient(*some: Tensor) -> Tensors:
            return _gradient(ctx.call, ctx.how, _merged(tensors, some, moving))

        pull = torch.func.vjp(gradient, *_chosen(tensors, moving))[1]
        found = iter(pull(_unwrapped(cotangents)))
        return (None, None, *(next(found) if moves else None for moves in moving))

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensors:
        call, how = ctx.call, ctx.how
        return _jvp(lambda *tensors: _gradient(call, how, tensors), call, how.given, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, how: _How, *tensors: Tensor) -> tuple[Tensors, Any]:
        given_dims, input_dims, cotangent_dims = how.parts(in_dims[2:])
        given, inputs, cotangents = how.parts(tensors)

        # An input that all members of the batch share has a gradient for each of them nevertheless.
        dims = tuple(0 if need else dim for need, dim in zip(how.needed, input_dims, strict=True))
        inputs = tuple(
            _in_front(tensor, dim, info.batch_size) if need else tensor
            for tensor, dim, need in zip(inputs, input_dims, how.needed, strict=True)
        )
        cotangents = tuple(
            _in_front(tensor, dim, info.batch_size) for tensor, dim in zip(cotangents, cotangent_dims, strict=True)
        )
        batched = _over_batch(call, dims, given_dims, info.randomness)
        found = _Gradient.apply(batched, how, *given, *inputs, *cotangents)
        return found, (0,) * len(found)


def _gradient(call: _Call, how: _How, tensors: Tensors) -> Tensors:
    """What :class:`_Gradient` computes, as an ordinary function that every transform knows."""
    given, inputs, directions = how.parts(tensors)

    def outputs(*some: Tensor) -> Tensors:
        with need_output(True):
            return _chosen(call.run(given, _merged(inputs, some, how.needed))[0], how.live)

    pull = torch.func.vjp(outputs, *_chosen(inputs, how.needed))[1]
    found: Tensors = pull(directions)
    return found


def _jvp(
    function: Callable[..., Tensors], call: _Call, kept: int, tensors: Tensors, tangents: Sequence[Tensor | None]
) -> Tensors:
    """The derivative of ``function`` along ``tangents``: of a function under remat, again one under remat.

    Else what is around would not see it: inside a Function's ``jvp`` no other forward mode goes on.
    """
    count, moving = len(tensors), tuple(tangent is not None for tangent in tangents)
    trace = _Trace((), frozenset())
    trace.leaving = call.trace.leaving

    def run(_: Tensors | None, parts: Tensors) -> tuple[Tensors, Tensors]:
        primals = _on_device(parts[:count], kept)

        def of_moving(*some: Tensor) -> Tensors:
            return function(*_merged(primals, some, moving))

        found: Tensors = torch.func.jvp(of_moving, _chosen(primals, moving), parts[count:])[1]
        trace.outputs = _Tree.of(found)[0]
        return found, ()

    out: Tensors = _Remat.apply(_Call(run, trace, call.host), *tensors, *_chosen(tangents, moving))
    return out


def _on_device(tensors: Tensors, kept: int) -> Tensors:
    """``tensors``, of which the first ``kept`` were kept, all where the last is."""
    device = tensors[-1].device
    return tuple(tensor.to(device) if index < kept else tensor for index, tensor in enumerate(tensors))


def _unwrapped(tensors: Tensors) -> Tensors:
    """Without what is left of transforms that have ended: operations look through it, nested calls do not."""
    return tuple(map(torch._C._functorch.unwrap_if_dead, tensors))


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _fetched(call: _Call, how: _How, tensors: Tensors) -> Tensors:
    """``tensors``, of which those that were kept are back on the device."""
    offloaded = [index for index, out in enumerate(call.trace.is_offloaded[: how.given]) if out]
    loaded = call.host.load([tensors[index] for index in offloaded], call.trace, tensors[-1].device)
    back = dict(zip(offloaded, loaded, strict=True))
    return tuple(back.get(index, tensor) for index, tensor in enumerate(tensors))


def _in_front(tensor: Tensor, dimension: int | None, size: int) -> Tensor:
    """``tensor`` for each member of a batch of ``size``, along its first dimension."""
    return tensor.expand(size, *tensor.shape) if dimension is None else tensor.movedim(dimension, 0)


def _chosen(tensors: Sequence[Any], which: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(tensor for tensor, chosen in zip(tensors, which, strict=True) if chosen)


def _merged(tensors: Tensors, some: Tensors, which: Sequence[bool]) -> Tensors:
    """``tensors``, with ``some`` in the places that ``which`` marks."""
    new = iter(some)
    return tuple(next(new) if chosen else tensor for tensor, chosen in zip(tensors, which, strict=True))
