"""Muon on a module of your own: ``functional_moe.optim`` and ``torch.func.functional_call``, nothing else.

    python examples/muon_in_your_code.py

A small Transformer of torch's own layers learns the source of ``inspect``, byte by byte: matrices by Muon, the rest by
AdamW. torch keeps q, k and v in one parameter; ``out_blocks=3`` says that it is three matrices. From the same start
AdamW alone does it, and ``torch.optim.Muon``, which must come to about the same loss.
"""

import inspect

import torch
from torch import Tensor, nn

from functional_moe import optim
from functional_moe.commands.program import end, read_flags


class Model(nn.Module):
    """Somebody's module; nothing in it knows of any of this."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask, is_causal=True))


def loss_of(params: dict[str, Tensor], model: nn.Module, windows: Tensor) -> Tensor:
    logits = torch.func.functional_call(model, params, (windows[:, :-1],))
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, data: Tensor, tx: optim.GradientTransformation) -> list[float]:
    """The loss of every step. The module is read, never changed; parameters and state are values."""
    params = {name: leaf.detach() for name, leaf in model.named_parameters()}
    state, losses = tx.init(params), []
    for windows in data:
        grads, loss = torch.func.grad_and_value(loss_of)(params, model, windows)
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        losses.append(loss.item())
    return losses


def main() -> None:
    steps = read_flags(__doc__, steps=150).steps
    text = torch.frombuffer(bytearray(inspect.getsource(inspect).encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - 64, (steps, 16, 1), generator=torch.Generator().manual_seed(0))
    data = text[starts + torch.arange(65)]
    torch.manual_seed(0)
    model = Model()
    # Matrices inside the network are Muon's; embeddings, the head, norms and biases are not.
    params = dict(model.named_parameters())
    labels = {name: "muon" if name.startswith("layers.") and p.ndim == 2 else "adamw" for name, p in params.items()}
    blocks = {name: 3 if name.endswith("in_proj_weight") else 1 for name in params}
    axes = {name: optim.MatrixAxes(out=0, in_=1, out_blocks=count) for name, count in blocks.items()}
    adamw, muon = optim.adamw(3e-3, weight_decay=0.0), optim.muon(0.02, axes)
    runs = {"AdamW": train(model, data, adamw), "torch.optim.Muon and AdamW": []}
    runs["Muon and AdamW"] = train(model, data, optim.partition({"muon": muon, "adamw": adamw}, labels))
    of = {label: [p for name, p in params.items() if labels[name] == label] for label in ("muon", "adamw")}
    torchs = (torch.optim.Muon(of["muon"], 0.02, weight_decay=0), torch.optim.AdamW(of["adamw"], 3e-3, weight_decay=0))
    for windows in data:
        loss = loss_of(params, model, windows)
        model.zero_grad()
        loss.backward()
        for optimizer in torchs:
            optimizer.step()
        runs["torch.optim.Muon and AdamW"].append(loss.item())
    for name, losses in runs.items():
        print(f"{name}: {sum(losses[-10:]) / len(losses[-10:]):.3f} nats per byte after {steps} steps")


if __name__ == "__main__":
    end(main)
