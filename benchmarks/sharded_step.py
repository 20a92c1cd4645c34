"""The sharded step against torch's ``fully_shard`` on the same layers: time, memory and bytes, on gloo processes.

Run: ``python benchmarks/sharded_step.py [--ranks 4] [--rounds 9] [--hidden-size 256] [--layers 6]``. The peer is an
``nn.Module`` of the same functions over the same parameters, so the arithmetic is the same; each layer is sharded with
``fully_shard``, gathered again for the backward, and trained by ``torch.optim.AdamW`` with the faster of its fused and
foreach forms. Prints medians over interleaved rounds and their ratios, the largest bytes of tensors alive on a rank
during a step, and the bytes that a rank sends in one.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from _report import Ratio, make_parser, write
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_moe import optim, parallel
from functional_moe.chain import Microbatch, make_chain
from functional_moe.config import MoEConfig
from functional_moe.model import Totals, count_totals, init_balance
from functional_moe.parameters import init
from functional_moe.sharding import model_layout
from functional_moe.train_step import init_state, make_train_step

RATE = 1e-3
BAR = 1.0  # of the peer's time, memory and bytes, at most; two places count


class AliveBytes(TorchDispatchMode):
    """The largest number of bytes of tensors alive at any operation, storages counted with the size they have then."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._track(getattr(thing, "_local_tensor", thing))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._track(leaf)
        storages = [storage for one in self._storages.values() if (storage := one()) is not None]
        self.peak = max(self.peak, sum(_memory(storage) for storage in storages))
        return out

    def _track(self, tensor: Tensor) -> None:
        # A matrix of oneDNN's own shows no storage: it stands for its memory.
        storage: Any = tensor if tensor.is_mkldnn else tensor.untyped_storage()
        key = id(tensor) if tensor.is_mkldnn else storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))


def _memory(storage: Any) -> int:
    size: int = storage.nbytes if isinstance(storage, Tensor) else storage.nbytes()
    return size


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends, by the least that each collective must send; and the number of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.messages = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            ranks = dist.get_world_size()
            size = max(_bytes(leaf) for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
            if "allreduce" in name:
                self.bytes += 2 * size * (ranks - 1) / ranks
            elif any(part in name for part in ("allgather", "reduce_scatter", "alltoall")):
                self.bytes += size * (ranks - 1) / ranks
            else:
                raise ValueError(f"no formula for the bytes that {name} sends")
            self.messages += 1
        return func(*args, **(kwargs or {}))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def our_step(config: MoEConfig, batch: dict[str, Tensor]) -> Callable[[], float]:
    layout = model_layout(config, parallel.make_mesh(dist.get_world_size(), 1))
    optimizer = optim.adamw(RATE, weight_decay=0.01)
    step = make_train_step(config, optimizer, layout=layout)
    state = init_state(init(config, seed=0, layout=layout), optimizer, config)

    def run() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        return float(metrics.loss)

    return run


class Part(nn.Module):
    """Some segments of the chain as a module, with the parameters of their layer."""

    def __init__(self, segments: list[Any], tree: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(tree)
        self.leaves = nn.ParameterList([nn.Parameter(leaf) for leaf in leaves])
        self.segments = segments

    def forward(self, x: Tensor | None, context: Any) -> tuple[Tensor | None, Tensor | None]:
        tree = pytree.tree_unflatten(list(self.leaves), self.spec)
        total = None
        for segment in self.segments:
            result = segment.function({segment.layers[0]: tree}, x, context, {})
            x = result.output
            if result.loss is not None:
                total = result.loss if total is None else total + result.loss
        return x, total


class Model(nn.Module):
    """All parts, one after the other."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        from functional_moe.chain import by_layer

        chain = make_chain(config)
        self.prepare = chain.prepare
        self.parts = nn.ModuleList(
            Part([segment for segment in chain.segments if segment.layers[0] == name], tree)
            for name, tree in by_layer(init(config, seed=0)).items()
        )

    def forward(self, microbatch: Microbatch) -> Tensor:
        context, x = self.prepare(microbatch), None
        losses = []
        for part in self.parts:
            x, loss = part(x, context)
            if loss is not None:
                losses.append(loss)
        return torch.stack(losses).sum()


def their_step(config: MoEConfig, batch: dict[str, Tensor], fused: bool) -> Callable[[], float]:
    model = Model(config)
    mesh = parallel.make_mesh(dist.get_world_size(), 1)["fsdp"]
    for part in model.parts[1:-1]:  # the ends stay with the root, as is usual
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (0.9, 0.999), weight_decay=0.01, fused=fused, foreach=not fused
    )
    balance = init_balance(config)

    def run() -> float:
        totals = torch.stack(count_totals(batch))
        dist.all_reduce(totals)
        loss = model(Microbatch(batch, balance, Totals(*totals)))
        (loss * dist.get_world_size()).backward()  # fully_shard takes the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        return float(reported)

    return run


def measure(config: MoEConfig, rows: int, seq: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(config.vocab_size, (rows, seq + 1), generator=generator)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    makers: dict[str, Callable[[], Callable[[], float]]] = {
        "functional_moe": lambda: our_step(config, batch),
        "fully_shard, fused AdamW": lambda: their_step(config, batch, True),
        "fully_shard, foreach AdamW": lambda: their_step(config, batch, False),
    }
    memory, sent, messages, losses = {}, {}, {}, {}
    for name, make in makers.items():
        run = make()
        losses[name] = [run() for _ in range(3)]
        with SentBytes() as counted:
            run()
        with AliveBytes() as alive:
            run()
        memory[name], sent[name], messages[name] = alive.peak, counted.bytes, counted.messages
        del run
        gc.collect()
    steps = {name: make() for name, make in makers.items()}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "memory": memory,
        "sent": sent,
        "messages": messages,
        "losses": losses,
    }


def shares(found: list[dict[str, Any]]) -> list[Ratio]:
    """Of time, memory and bytes, ours over that of the faster peer; each the largest of any rank."""
    names = list(found[0]["seconds"])
    ours, best = names[0], min(names[1:], key=lambda name: found[0]["seconds"][name])
    out = []
    for key in ("seconds", "memory", "sent"):
        values = {name: max(one[key][name] for one in found) for name in names}
        out.append(Ratio(f"{key} of a sharded step", best, round(values[ours] / values[best], 2), BAR, False))
    return out


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    first = found[0]
    names = list(first["seconds"])
    yield f"{'':<28}{'seconds':>9}{'peak MiB':>10}{'sent MiB':>10}{'messages':>10}   losses"
    for name in names:
        peak = max(one["memory"][name] for one in found) / 2**20
        losses = " ".join(f"{loss:.5f}" for loss in first["losses"][name])
        yield (
            f"{name:<28}{first['seconds'][name]:>9.3f}{peak:>10.1f}{first['sent'][name] / 2**20:>10.1f}"
            f"{first['messages'][name]:>10}   {losses}"
        )
    for share in shares(found):
        yield f"{share.what}: {share.value:.2f} of {share.peer}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=2, help="of each rank")
    parser.add_argument("--seq-len", type=int, default=256)
    arguments = parser.parse_args()
    config = MoEConfig(
        vocab_size=4096,
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=arguments.hidden_size,
        use_qk_norm=True,
        router_aux_loss_coef=0.01,
    )
    run = (config, arguments.rows, arguments.seq_len, arguments.rounds)
    found = parallel.spawn(measure, arguments.ranks, *run, timeout=600.0)
    print(f"{config.num_params:,} parameters, {arguments.ranks} ranks of one thread")
    print("\n".join(table(found)))
    write(arguments.json, shares(found))


if __name__ == "__main__":
    main()
