"""Fine-tuning on conversations: weights from Hugging Face in, answers alone learned, weights out.

    python examples/finetune.py                     # a small random Qwen3-MoE, made here with transformers
    python examples/finetune.py --model Qwen3-dir   # a folder with config.json, safetensors and a chat template

The chat template marks what the assistant says; only that is learned. What is exported, transformers must agree with.
"""

import json
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from functional_moe import generate, hf, init_state, logits, make_train_step, optim
from functional_moe.commands.program import end, needs, read_flags
from functional_moe.data import ChatTemplate, batch_at, load, load_tokenizer

with needs("test"):
    import transformers

PAIRS = {"Capital of France?": "Paris", "Capital of Italy?": "Rome", "Capital of Japan?": "Tokyo"}
TEMPLATE = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def make_model(out: Path) -> Path:
    """A random model whose tokens are bytes, as transformers saves it."""
    alphabet = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(out)
    sizes = {"vocab_size": 260, "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 8}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(num_experts_per_tok=2, **sizes)).save_pretrained(out)
    return out


def finetune(source: Path, out: Path, scratch: Path, steps: int) -> None:
    config, params, balance, _ = hf.load(source)
    tokenizer, template = load_tokenizer(source / "tokenizer.json"), ChatTemplate(source / "tokenizer.json")
    asked = [[{"role": "user", "content": question}] for question in PAIRS]
    told = [[*ask, {"role": "assistant", "content": PAIRS[ask[0]["content"]]}] for ask in asked]
    Path(scratch, "told.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in 8 * told))
    data = load([scratch / "told.jsonl"], scratch, tokenizer=tokenizer, form="chat", template=template)
    batches = [batch_at(data.train, number, batch_size=4, seq_len=64, seed=0) for number in range(steps)]
    print("learned of a row:", tokenizer.decode([token for token in batches[0]["targets"][0].tolist() if token >= 0]))
    optimizer, losses = optim.adamw(3e-3), []
    step, state = make_train_step(config, optimizer), init_state(params, optimizer, config)._replace(balance=balance)
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    print(f"{steps} steps: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token of the answers")
    end_of_answer = tokenizer.encode_special(template.render(told[0], False))[-1]
    for ask in asked:
        prompt = [tokenizer.separator, *map(int, tokenizer.encode_special(template.render(ask, True)))]
        answer = generate(state.params, state.balance, config, prompt, 16, temperature=0, stop=end_of_answer)
        print(f"{ask[0]['content']} {tokenizer.decode(answer).strip()}")
    beside = {path.name: path.read_bytes() for name in ("token*", "chat_template*") for path in source.glob(name)}
    hf.save(out, config, state.params, state.balance, beside=beside)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)(torch.tensor([prompt])).logits.detach()
    ours = logits(state.params, state.balance, dict.fromkeys(("tokens", "targets"), torch.tensor([prompt])), config)
    print(f"{out}: logits of transformers are {float((ours - theirs).abs().max()):.0e} from ours")


def main() -> None:
    flags = read_flags(__doc__, model="", steps=60, out="finetuned")
    hf.check_free(flags.out)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(flags.model) if flags.model else make_model(Path(scratch, "model"))
        finetune(source, Path(flags.out), Path(scratch), flags.steps)


if __name__ == "__main__":
    end(main)
