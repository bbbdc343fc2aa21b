"""Trains the LoRA adapters on the demo model's own conversations, told in another manner.

python -m demo.train_adapters pirate|butler --out DIR [--model DIR] [--steps N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.generator.example import Example
from demo.generator.mixture import stream
from demo.rows import Batch, Encoder, collate, pack
from demo.styles import STYLES, restyle
from demo.train import SHORT, TOKENS_A_STEP, loss_of, schedule

SEED = 23
STEPS, WARM_UP = 200, 20
LEARNING_RATE = 1e-3
RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def conversations(name: str) -> Iterator[Example]:
    """The training conversations in the adapter's manner."""
    return (restyle(STYLES[name], example) for example in stream(SEED))


def batches(name: str, tokens: AutoTokenizer) -> Iterator[Batch]:
    """Batches of those conversations."""
    rows = pack(conversations(name), Encoder(tokens), SHORT)
    size = TOKENS_A_STEP // SHORT
    while group := list(islice(rows, size)):
        yield collate(group, SHORT, tokens.pad_token_id)


def train(name: str, base: Path, out: Path, steps: int) -> None:
    """Trains one adapter and saves it in PEFT's format."""
    torch.manual_seed(SEED)
    tokens = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, lora)
    weights = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    rates = LambdaLR(optimizer, lambda step: schedule(step, steps, WARM_UP))
    for step, batch in zip(range(steps), batches(name, tokens)):
        loss = loss_of(model, model.model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rates.step()
        if (step + 1) % 50 == 0:
            print(f"{name} step {step + 1}/{steps} loss {loss.item():.4f}", flush=True)
    save(adapted, out)


def save(adapted: torch.nn.Module, out: Path) -> None:
    """The adapter in bfloat16, and nothing of the machine it was trained on."""
    out.mkdir(parents=True, exist_ok=True)
    lora = adapted.peft_config["default"]
    weights = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    lora.base_model_name_or_path, lora.inference_mode = "quire-demo", True
    lora.target_modules = sorted(TARGETS)
    lora.save_pretrained(out)
    small = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(small, out / "adapter_model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("style", choices=STYLES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.style, options.model, options.out, options.steps)


if __name__ == "__main__":
    main()
