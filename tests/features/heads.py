"""An EAGLE head that knows what the workload's requests get: trained on just that."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.engine.speculative.eagle_folders import eagle_parts, layer, linear
from tests.engine.speculative.head_folders import write
from tests.survey.tiny import Oracle

_STEPS = 25


def trained_head(folder: Path, model: Path, texts: list[list[int]]) -> Path:
    """Write it to `folder`; `texts`: prompts and what came behind them."""
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    head = weights.get("lm_head.weight", embedding).float()
    oracle = Oracle(model).model
    config, tensors = eagle_parts()
    tensors = {name: tensor.float().requires_grad_() for name, tensor in tensors.items()}
    with torch.no_grad():
        seen = [oracle.model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    training = torch.optim.Adam(tensors.values(), lr=0.01)
    for _ in range(_STEPS):
        training.zero_grad()
        for text, states in zip(texts, seen, strict=True):
            x = torch.cat((embedding[text[1:-1]], states[:-2]), dim=-1).double()
            x = linear(tensors, "fc", x)
            logits = layer(tensors, "layers.0.", x, x) @ head.double().T
            torch.nn.functional.cross_entropy(logits, torch.tensor(text[2:])).backward()
        training.step()
    return write(folder, config, {name: tensor.detach() for name, tensor in tensors.items()})
