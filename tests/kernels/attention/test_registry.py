"""Which backend is chosen, and why others aren't."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from kernels.attention import AttentionRequirements, NoAttentionBackend, get_backend, select_backend
from kernels.attention.registry import BACKENDS, PRIORITY

HOPPER = AttentionRequirements(device="cuda", capability=90)
CPU = AttentionRequirements(device="cpu", dtype="fp32", kv_dtype="fp32")


def test_priority_decides():
    assert select_backend(HOPPER).name == "TRITON_ATTN"
    assert select_backend(CPU).name == "CPU_ATTN"


def test_latents_that_are_too_large_go_to_who_has_such_heads():
    latents = dataclasses.replace(HOPPER, head_size=576, latent=512)
    assert select_backend(latents).name == "TRITON_ATTN"
    larger = dataclasses.replace(HOPPER, head_size=1088, latent=1024)
    assert select_backend(larger).name == "FLEX_ATTENTION"
    exact = dataclasses.replace(latents, dtype="fp32", kv_dtype="auto")
    assert select_backend(exact).name == "TRITON_ATTN"
    assert select_backend(dataclasses.replace(exact, capability=89)).name == "FLEX_ATTENTION"
    functions = [backend.load_latents for backend in BACKENDS.values() if backend.latents]
    assert all(load is not None and callable(load()) for load in functions)
    assert functions


def test_the_first_that_fits_is_taken(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert select_backend(HOPPER).name == "TORCH_SDPA"
    refused = get_backend("FLEX_ATTENTION").refusals
    assert refused(HOPPER) == ["triton is not installed"]
    assert refused(CPU) == []


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("TRITON_ATTN", {"capability": 75}, "compute capability 7.5"),
        ("TRITON_ATTN", {"head_size": 512}, "head size 512"),
        ("TRITON_ATTN", {"head_size": 1088, "latent": 1024}, "latent of 1024 values and 64 beside"),
        ("FLASHINFER", {"head_size": 576, "latent": 512}, "latent of 512 values and 64 beside it"),
        ("TRITON_ATTN", {"block_size": 6}, "block size 6"),
        ("TRITON_ATTN", {"attention_type": "encoder"}, "attention type encoder"),
        ("TRITON_ATTN", {"device": "cpu"}, "device cpu"),
        ("FLASH_ATTN", {"dtype": "fp32", "kv_dtype": "fp32"}, "dtype fp32"),
        ("FLASH_ATTN", {"sinks": True}, "sinks"),
        ("FLASH_ATTN", {}, "flash_attn_interface is not installed"),
        ("FLASHINFER", {"alibi": True}, "ALiBi"),
        ("FLEX_ATTENTION", {"kv_dtype": "fp8_e4m3"}, "KV cache dtype fp8_e4m3"),
        ("TORCH_SDPA", {"soft_cap": True}, "soft cap"),
        ("TRITON_ATTN", {"sparse": True}, "block-sparse attention not supported"),
        ("TORCH_SDPA", {"bidirectional": True}, "bidirectional spans not supported"),
    ],
)
def test_a_forced_backend_that_does_not_fit_is_refused_with_reasons(name, change, reason):
    with pytest.raises(NoAttentionBackend, match=reason) as caught:
        select_backend(dataclasses.replace(HOPPER, **change), name)
    assert any(reason in text for text in caught.value.reasons[name])


def test_a_refusal_names_the_backends_that_fit():
    need = dataclasses.replace(HOPPER, device="cpu")
    with pytest.raises(NoAttentionBackend, match=r"\. Leave it out, or name .*TORCH_SDPA"):
        select_backend(need, "FLASH_ATTN")


def test_all_reasons_are_given_where_nothing_fits():
    need = dataclasses.replace(HOPPER, head_size=512, sinks=True)
    with pytest.raises(NoAttentionBackend, match="TRITON_ATTN: head size 512") as caught:
        select_backend(need)
    assert set(caught.value.reasons) == set(PRIORITY["cuda"])
    assert all(caught.value.reasons.values())


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(NoAttentionBackend, match="FASTEST"):
        get_backend("FASTEST")
    with pytest.raises(NoAttentionBackend, match=r"TREE_ATTN.*one row of tokens.*CPU_ATTN"):
        get_backend("TREE_ATTN")
    with pytest.raises(NoAttentionBackend, match=r"ROCM_AITER_FA.*pages of another layout"):
        get_backend("ROCM_AITER_FA")
    with pytest.raises(NoAttentionBackend, match=r"FLASH_ATTN_DIFFKV.*another size than keys"):
        get_backend("FLASH_ATTN_DIFFKV")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("CUTLASS_MLA", "compute capability 10"),
        ("FLASHINFER_MLA", "compute capability 10"),
        ("FLASHMLA", "blocks of 64 tokens"),
        ("FLASH_ATTN_MLA", "compute capability 9"),
        ("TRITON_MLA", "by TRITON_ATTN"),
        ("FLASHMLA_SPARSE", "DeepSeek-V3.2"),
        ("FLASHINFER_MLA_SPARSE", "DeepSeek-V3.2"),
        ("ROCM_AITER_MLA", "by ROCM_ATTN"),
        ("ROCM_AITER_MLA_SPARSE", "DeepSeek-V3.2"),
        ("ROCM_AITER_TRITON_MLA", "by ROCM_ATTN"),
    ],
)
def test_vllms_backends_over_latents_are_refused_with_what_stands_for_them(name, reason):
    with pytest.raises(NoAttentionBackend, match=f"{name}.*{reason}"):
        get_backend(name)


def test_a_cache_of_the_activations_dtype_is_auto():
    fp32 = dataclasses.replace(HOPPER, dtype="fp32", kv_dtype="fp32")
    assert BACKENDS["TRITON_ATTN"].refusals(fp32) == []
    mixed = dataclasses.replace(HOPPER, dtype="bf16", kv_dtype="fp16")
    assert BACKENDS["FLASHINFER"].refusals(mixed)[0] == "KV cache dtype fp16 not supported"


def test_on_amds_gpus_libraries_of_nvidias_are_refused_and_vllms_name_works():
    need = AttentionRequirements(device="cuda", vendor="amd")
    for name in ("FLASH_ATTN", "FLASHINFER"):
        with pytest.raises(NoAttentionBackend, match="GPU of AMD not supported"):
            select_backend(need, name)
    assert get_backend("ROCM_ATTN").refusals(need) == get_backend("TRITON_ATTN").refusals(need)
    with pytest.raises(NoAttentionBackend, match="GPU of NVIDIA not supported"):
        select_backend(AttentionRequirements(device="cuda", capability=90), "ROCM_ATTN")
    with pytest.raises(NoAttentionBackend, match="aiter is not installed"):
        select_backend(need, "ROCM_AITER_UNIFIED_ATTN")
    with pytest.raises(NoAttentionBackend, match="GPU of NVIDIA not supported"):
        select_backend(HOPPER, "ROCM_AITER_UNIFIED_ATTN")


def test_aiters_kernel_is_chosen_where_it_is_asked_for(monkeypatch):
    need = AttentionRequirements(device="cuda", vendor="amd")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert select_backend(need, "ROCM_AITER_UNIFIED_ATTN").name == "ROCM_AITER_UNIFIED_ATTN"
    assert select_backend(need).name == "TRITON_ATTN"
