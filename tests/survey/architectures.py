"""The architectures that a vLLM-class engine is expected to serve."""

from __future__ import annotations

_NO_CLASS = "no class in transformers; its code comes with the checkpoint"

#: Architecture -> (models, why it's left out, or "" where recipes prove it).
EXPECTED: dict[str, tuple[str, str]] = {
    "AquilaForCausalLM": ("Aquila, Aquila2", ""),
    "ArcticForCausalLM": ("Arctic", ""),
    "BaiChuanForCausalLM": ("Baichuan, Baichuan 2: 7B and 13B", ""),
    "BloomForCausalLM": ("BLOOM, BLOOMZ, BLOOMChat", ""),
    "ChatGLMModel": ("ChatGLM 2 and 3", ""),
    "CohereForCausalLM": ("Command-R", ""),
    "DbrxForCausalLM": ("DBRX", ""),
    "DeciLMForCausalLM": ("DeciLM 7B", ""),
    "FalconForCausalLM": ("Falcon 7B, 40B, RW", ""),
    "GemmaForCausalLM": ("Gemma", ""),
    "Gemma2ForCausalLM": ("Gemma 2", ""),
    "GPT2LMHeadModel": ("GPT-2", ""),
    "GPTBigCodeForCausalLM": ("StarCoder, SantaCoder, WizardCoder", ""),
    "GPTJForCausalLM": ("GPT-J", ""),
    "GPTNeoXForCausalLM": ("GPT-NeoX, Pythia, OpenAssistant, Dolly V2", ""),
    "InternLMForCausalLM": ("InternLM", ""),
    "InternLM2ForCausalLM": ("InternLM2", ""),
    "JAISLMHeadModel": ("Jais 13B, 30B", ""),
    "JambaForCausalLM": ("Jamba", ""),
    "LlamaForCausalLM": ("Llama 1 to 3, Vicuna, Yi", ""),
    "MiniCPMForCausalLM": ("MiniCPM", ""),
    "MistralForCausalLM": ("Mistral", ""),
    "MixtralForCausalLM": ("Mixtral 8x7B, 8x22B", ""),
    "MptForCausalLM": ("MPT", ""),
    "OlmoForCausalLM": ("OLMo", ""),
    "OPTForCausalLM": ("OPT, OPT-IML", ""),
    "OrionForCausalLM": ("Orion", ""),
    "PhiForCausalLM": ("Phi-1.5, Phi-2", ""),
    "Phi3ForCausalLM": ("Phi-3 mini and medium", ""),
    "Phi3SmallForCausalLM": ("Phi-3 small", ""),
    "Phi3VForCausalLM": ("Phi-3 vision", _NO_CLASS),
    "QWenLMHeadModel": ("Qwen", ""),
    "Qwen2ForCausalLM": ("Qwen 1.5, 2, 2.5", ""),
    "Qwen2MoeForCausalLM": ("Qwen 1.5 MoE", ""),
    "StableLmForCausalLM": ("StableLM", ""),
    "Starcoder2ForCausalLM": ("StarCoder 2", ""),
    "XverseForCausalLM": ("Xverse", ""),
}
