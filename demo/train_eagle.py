"""Trains an EAGLE head for the demo model: a layer over its hidden states that guesses what it says
next (Li et al. 2024).

    python -m demo.train_eagle --out DIR [--model DIR] [--steps N] [--threads N]

It learns the conversations that the demo model was trained on: the token that follows, and the
model's state there, from which the next guess goes on. `python -m demo.widen FOLDER --model DIR`
makes it fit a model that was widened as much.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from demo.fit import fit, run
from demo.rows import Batch
from demo.train import batches

SEED = 31
STEPS, WARM_UP = 400, 30
RATE = 2e-3
#: States are off by as much in training as guesses at them are.
NOISE = 0.1
#: What the token counts beside the state.
TOKENS = 0.5


class Head(nn.Module):
    """x = fc [embedding of the next token, state]; a layer that norms nothing before attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """The states that follow."""
        x = self.fc(torch.cat((embedded, states), dim=-1))
        angles = self.rotary(x, positions)
        return self.layer(
            x, attention_mask=mask, position_ids=positions, position_embeddings=angles
        )


def loss_of(head: Head, target: LlamaForCausalLM, batch: Batch) -> Tensor:
    """How far off the learned tokens and their states are."""
    with torch.no_grad():
        states = target.model(
            input_ids=batch.tokens,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        embedded = target.model.embed_tokens(batch.tokens[:, 1:])
    before = states[:, :-1] + NOISE * (2 * torch.rand_like(states[:, :-1]) - 1)
    found = head(embedded, before, batch.mask[:, :, :-1, :-1], batch.positions[:, :-1])
    labels = batch.labels[:, 1:]
    goes_on = batch.mask[:, 0].diagonal(-1, 1, 2)  # both tokens are of one conversation
    learned = (labels != -100) & goes_on
    state_loss = nn.functional.smooth_l1_loss(found[learned], states[:, 1:][learned])
    token_loss = nn.functional.cross_entropy(target.lm_head(found[learned]), labels[learned])
    return state_loss + TOKENS * token_loss


def save(head: Head, config: LlamaConfig, out: Path) -> None:
    """As EAGLE's authors publish theirs."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.replace("layer.", "layers.0."): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
        if not name.startswith("rotary.")
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    told = {**config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    (out / "config.json").write_text(json.dumps(told, indent=2))


def train(base: Path, out: Path, steps: int) -> None:
    """The whole run."""
    torch.manual_seed(SEED)
    tokens = AutoTokenizer.from_pretrained(base)
    target = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)
    head = Head(target.config)
    fit(
        head, batches(tokens, SEED, echo_steps=0), lambda batch: loss_of(head, target, batch),
        steps=steps, rate=RATE, warm_up=WARM_UP,
    )  # fmt: skip
    save(head, target.config, out)


if __name__ == "__main__":
    run(train, STEPS, __doc__)
