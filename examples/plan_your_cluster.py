"""What a model would need on your machines, before anybody pays for them.

    python examples/plan_your_cluster.py

``CLUSTER`` describes the machine: replace its figures by yours, or measure a node with ``functional-moe calibrate`` and
give the file: ``--hardware this-node.toml``. One rank's training step runs on fake tensors; its schedule within the
memory is planned, verified, simulated, and told in five lines; then the same on more nodes, and with longer sequences.
"""

import contextlib

from functional_moe import MoEConfig
from functional_moe.commands.program import end, read_flags
from functional_moe.commands.settings import SettingsError
from functional_moe.dry_run import dry_run
from functional_moe.machine import Machine, MemoryTier, Rate, Wire, read_machine
from functional_moe.memory import HBM, HOST, explain
from functional_moe.predict import Choice, predict

CLUSTER = Machine(
    name="nodes of 8 x 80 GB",
    devices_per_node=8,
    tiers={
        HBM: MemoryTier(bytes=75 * 10**9, bandwidth=3e12),  # what the runtime and NCCL leave
        HOST: MemoryTier(bytes=100 * 10**9, bandwidth=100e9, write=45e9, read=45e9),  # a device's share, over PCIe
    },
    node=Wire(bandwidth=64e9, sustained=50e9),  # to each other device of the node
    network=Wire(bandwidth=50e9, sustained=40e9, latency=1e-5),  # of one device, to other nodes
    products={
        "bfloat16": Rate(peak=989e12, sustained=450e12, whole_steps=True),  # as your training steps reach it
        "float32": Rate(peak=67e12, sustained=45e12),
    },
    host_products={"float32": Rate(peak=1e12, sustained=0.5e12)},
)
MODEL = MoEConfig(  # of the size of Qwen3-30B-A3B: 30.5 billion parameters, 3.3 active
    **{"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "max_position_embeddings": 32_768, "compute_dtype": "bfloat16"},
)


def report(machine: Machine, nodes: int, tokens: int) -> str:
    """One sequence on each device, experts spread over a node, all else over all devices."""
    try:
        found = predict(dry_run(MODEL, nodes, machine.devices_per_node, tokens), machine, Choice())
    except ValueError as error:  # what does not fit or divide, and by how much
        raise SettingsError(f"{nodes} nodes, {tokens} tokens on each device: {error}") from error
    speed = f"{found.tokens_per_second:.0f} tokens/s each, {found.model_utilisation:.0%} of the peak"
    return f"{nodes} nodes, {tokens} tokens on each device: {speed}\n{explain(found.plan)}"


def main() -> None:
    flags = read_flags(__doc__, hardware="", nodes=4, tokens=16_384)
    machine = read_machine(flags.hardware) if flags.hardware else CLUSTER
    print(
        f"{MODEL.num_params / 1e9:.1f} billion parameters, {MODEL.num_active_params / 1e9:.1f} active; {machine.name}"
    )
    print(report(machine, flags.nodes, flags.tokens))
    for nodes, tokens in ((2 * flags.nodes, flags.tokens), (flags.nodes, 2 * flags.tokens)):
        with contextlib.suppress(SettingsError):  # the model may take no longer sequences
            print(report(machine, nodes, tokens))


if __name__ == "__main__":
    end(main)
