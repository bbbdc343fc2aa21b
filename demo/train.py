"""Trains the demo model.

    python -m demo.train --out DIR [--steps N] [--minutes N] [--compile]

The tokenizer is trained first where OUT has none. A run that was cut off goes on from its last
checkpoint: the data are drawn again from the seed and skipped up to there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo import tokenizer as bpe
from demo.generator.example import Example
from demo.generator.mixture import echoes, long_conversation, stream
from demo.rows import Batch, Encoder, collate, pack

SEED = 7
SHORT, LONG = 256, 1024
TOKENS_A_STEP = 2048
LONG_EVERY = 16  # one batch in so many holds long conversations
ECHO_STEPS = 400  # at the start half of a batch are echoes
LAYER_RATE, REST_RATE = 4e-3, 2e-3
WARM_UP, FLOOR = 100, 0.02
DECAY, BETAS, CLIP = 0.1, (0.9, 0.98), 1.0
SAVE_EVERY = 250
TEMPERATURE = 0.2  # of requests that name none: at 1.0 a model this small gets sums wrong


def config(tokens: AutoTokenizer) -> LlamaConfig:
    """A Llama with grouped-query attention and tied embeddings."""
    return LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        initializer_range=0.06,  # so that a token is told from others before it is trained
        attn_implementation="sdpa",
    )


def initial(tokens: AutoTokenizer) -> LlamaForCausalLM:
    """The untrained model. Its layers add nothing at first, and leave the token as it is."""
    model = LlamaForCausalLM(config(tokens))
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
    return model


def batches(tokens: AutoTokenizer, seed: int, echo_steps: int = ECHO_STEPS) -> Iterator[Batch]:
    """Batches of one number of tokens: at first with many echoes, now and then with long rows."""
    encoder, pad = Encoder(tokens), tokens.pad_token_id
    short = pack(stream(seed), encoder, SHORT)
    copies = pack(echoes(seed), encoder, SHORT)
    long = pack(_long_conversations(Random(seed)), encoder, LONG)
    for step in count(1):
        if step % LONG_EVERY == 0:
            yield collate(list(islice(long, TOKENS_A_STEP // LONG)), LONG, pad)
            continue
        size = TOKENS_A_STEP // SHORT
        first = list(islice(copies, size // 2)) if step <= echo_steps else []
        yield collate(first + list(islice(short, size - len(first))), SHORT, pad)


def _long_conversations(rng: Random) -> Iterator[Example]:
    while True:
        yield long_conversation(rng, rng.randint(12, 22))


def schedule(step: int, steps: int, warm_up: int = WARM_UP) -> float:
    """The share of the peak learning rate: a linear warm-up, then a cosine."""
    done = min(1.0, max(0, step - warm_up) / max(1, steps - warm_up))
    cosine = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2
    return min(1.0, (step + 1) / warm_up) * cosine


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms.

    On this little data the layers learn in two thirds of the steps that AdamW alone takes.
    """

    def __init__(self, model: nn.Module) -> None:
        weights = dict(model.named_parameters())
        layers = [w for name, w in weights.items() if w.dim() == 2 and "embed" not in name]
        rest = [w for name, w in weights.items() if w.dim() < 2 or "embed" in name]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                layers, lr=LAYER_RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(rest, lr=REST_RATE, betas=BETAS, weight_decay=0.0),
        ]

    def step(self, scale: float) -> None:
        """One step, at this share of the peak learning rates."""
        for part, peak in zip(self._parts, (LAYER_RATE, REST_RATE)):
            part.param_groups[0]["lr"] = peak * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the state to save in a checkpoint."""
        return {
            f"{number}.{index}.{name}": value
            for number, part in enumerate(self._parts)
            for index, entry in part.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def load(self, saved: dict[str, torch.Tensor]) -> None:
        """The state of a checkpoint."""
        for number, part in enumerate(self._parts):
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in saved.items():
                part_of, index, name = key.split(".")
                if int(part_of) == number:
                    state.setdefault(int(index), {})[name] = value
            part.load_state_dict({**part.state_dict(), "state": state})


def loss_of(model: nn.Module, body: Callable, batch: Batch) -> torch.Tensor:
    """The mean loss over the learned tokens; the head runs for those alone."""
    device = next(model.parameters()).device
    learned = batch.labels != -100
    with torch.autocast(device.type, torch.bfloat16):
        hidden = body(
            input_ids=batch.tokens.to(device),
            attention_mask=batch.mask.to(device),
            position_ids=batch.positions.to(device),
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden[learned.to(device)])
    return nn.functional.cross_entropy(logits.float(), batch.labels[learned].to(device))


def update(model: nn.Module, optimizer: Optimizer, loss: torch.Tensor, scale: float) -> None:
    """One step against the loss."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step(scale)


def save_checkpoint(out: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Weights and optimizer state, renamed into place so that they are never half written."""
    state = {f"model/{name}": weight.data for name, weight in model.named_parameters()}
    state |= {f"optimizer/{name}": value for name, value in optimizer.state().items()}
    save_file(state, out / "checkpoint.tmp", metadata={"step": str(step)})
    (out / "checkpoint.tmp").rename(out / "checkpoint.safetensors")


def load_checkpoint(out: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Return the step to resume from: 0 without a checkpoint."""
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0
    saved = load_file(path)
    for name, weight in model.named_parameters():
        weight.data.copy_(saved[f"model/{name}"])
    prefix = "optimizer/"
    optimizer.load({k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)})
    with safe_open(path, "pt") as header:
        return int(header.metadata()["step"])


def export(out: Path, model: LlamaForCausalLM, tokens: AutoTokenizer) -> None:
    """The model as it ships, in bfloat16. The model in training is left as it is."""
    shipped = LlamaForCausalLM(model.config).to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    ends = [tokens.eos_token_id, tokens.convert_tokens_to_ids("<|endoftext|>")]
    shipped.generation_config.update(
        eos_token_id=ends,
        pad_token_id=tokens.pad_token_id,
        do_sample=True,
        temperature=TEMPERATURE,
    )
    shipped.save_pretrained(out)
    tokens.save_pretrained(out, save_jinja_files=False)


def train(out: Path, steps: int, minutes: float, compiled: bool) -> None:
    """The whole run."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "tokenizer.json").exists():
        bpe.main(out)
    tokens = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = initial(tokens).to(device)
    body = torch.compile(model.model) if compiled else model.model
    optimizer = Optimizer(model)
    first = load_checkpoint(out, model, optimizer)
    print(f"{model.num_parameters():,} parameters, from step {first}", flush=True)
    started, losses = time.monotonic(), []
    for step, batch in zip(range(steps), batches(tokens, SEED)):
        if step < first:
            continue
        loss = loss_of(model, body, batch)
        update(model, optimizer, loss, schedule(step, steps))
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1}/{steps} loss {mean:.4f} {seconds:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save_checkpoint(out, model, optimizer, step + 1)
            export(out, model, tokens)
        if time.monotonic() - started > minutes * 60:
            break


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="a little faster; needs a compiler")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.steps, options.minutes, options.compile)


if __name__ == "__main__":
    main()
