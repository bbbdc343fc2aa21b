"""Phi-3 small beyond what the survey compares: its published config, and tokens that never come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.models.attention_backend import with_attention_backend
from engine.models.registry import decoder_spec
from kernels.attention import BlockSparse

PUBLISHED: dict[str, Any] = {
    "architectures": ["Phi3SmallForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_act": "gegelu",
    "ff_intermediate_size": 14336,
    "rope_embedding_base": 1000000,
}


def test_the_published_config_needs_few_words() -> None:
    spec = decoder_spec(PUBLISHED)
    assert spec.sparse == BlockSparse(block=64, local=16, stride=8, head_step=1)
    assert spec.sparse_layers == (True, False) * 16
    assert (spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (8, 128, 14336)
    assert (spec.embedding_scale, spec.logit_scale, spec.attention_scale) == (10, 1 / 8, 1 / 128)
    assert spec.rope is not None
    assert spec.rope.theta == 1000000
    assert len(spec.suppressed_tokens) == 91
    assert {100256, 100258, 100276, 100351} <= set(spec.suppressed_tokens)
    assert not {100255, 100257, 100261, 100266} & set(spec.suppressed_tokens)


def test_a_token_that_its_tokenizer_never_means_never_comes(
    checkpoint: Callable[[str], Path],
) -> None:
    llm = LLM(
        str(checkpoint("phi3small")), dtype="float32", num_gpu_blocks_override=32,
        max_model_len=128,
    )  # fmt: skip
    params = SamplingParams(
        temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True, logit_bias={3: 100.0}
    )
    result = llm.generate([[5, 3, 8]], params, use_tqdm=False)[0]
    assert 3 not in result.outputs[0].token_ids
    scores = result.prompt_logprobs
    assert scores is not None
    assert scores[1] is not None
    assert -4e38 < scores[1][3].logprob < -1e30


def test_attention_that_hides_no_blocks_is_refused() -> None:
    """The kernels' own on a GPU, where results are to keep their bits."""
    ops = cast(Any, SimpleNamespace(device=torch.device("cuda"), has_own_attention=False))
    config = cast(Any, SimpleNamespace(batch_invariant=True, attention_backend=None))
    with pytest.raises(ConfigError, match=r"TRITON_ATTN.*isn't block-sparse") as caught:
        with_attention_backend(ops, decoder_spec(PUBLISHED), torch.float32, config)
    assert caught.value.param == "batch_invariant"
