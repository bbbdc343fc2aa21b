"""Trains the demo model's draft: a model of a fifth of its size that guesses what it says next.

    python -m demo.train_draft --out DIR [--model DIR] [--steps N] [--threads N]

It learns the conversations that the demo model was trained on, and begins with its embedding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from demo.fit import fit, run
from demo.rows import Batch
from demo.train import batches, export

SEED = 29
STEPS, WARM_UP = 1000, 30
RATE = 3e-3


def config(target: LlamaConfig) -> LlamaConfig:
    """The target's vocabulary and context, half of its width and of its depth."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        initializer_range=0.06,
        attn_implementation="sdpa",
    )


def initial(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """The untrained draft. Its tokens lie as the target's do, in the directions that matter most;
    its layers add nothing at first.
    """
    draft = LlamaForCausalLM(config(target.config))
    for name, weight in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
    left, sizes, _ = torch.linalg.svd(target.model.embed_tokens.weight, full_matrices=False)
    width = draft.config.hidden_size
    with torch.no_grad():
        draft.model.embed_tokens.weight.copy_(left[:, :width] * sizes[:width])
    return draft


def loss_of(draft: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The mean loss over the learned tokens, in float32: the draft is too small for less to pay."""
    learned = batch.labels != -100
    hidden = draft.model(
        input_ids=batch.tokens,
        attention_mask=batch.mask,
        position_ids=batch.positions,
        use_cache=False,
    ).last_hidden_state
    return nn.functional.cross_entropy(draft.lm_head(hidden[learned]), batch.labels[learned])


def train(base: Path, out: Path, steps: int) -> None:
    """The whole run; the draft is saved with the target's tokenizer."""
    torch.manual_seed(SEED)
    tokens = AutoTokenizer.from_pretrained(base)
    target = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    draft = initial(target)
    print(f"{draft.num_parameters():,} parameters", flush=True)
    fit(
        draft, batches(tokens, SEED, echo_steps=0), lambda batch: loss_of(draft, batch),
        steps=steps, rate=RATE, warm_up=WARM_UP,
    )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    export(out, draft, tokens)


if __name__ == "__main__":
    run(train, STEPS, __doc__)
