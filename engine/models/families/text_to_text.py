"""Text encoder-decoders: BART, mBART, Marian, M2M-100 and T5."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine.contract.errors import ModelLoadError
from engine.models.decoder_spec import CrossAttentionSpec, RelativeBiasSpec, WeightNames
from engine.models.encoders.encoder_spec import EncoderNames, EncoderSpec
from engine.models.families.common import ACTIVATIONS, Config, Family, refuse

_BART: dict[str, Any] = {
    "embedding": "model.shared",
    "positions": "model.decoder.embed_positions",
    "layer": "model.decoder.layers.{}.",
    "o": "self_attn.out_proj",
    "up": ("fc1",),
    "down": "fc2",
}
_BART_ENCODER: dict[str, Any] = {
    "prefix": "model.",
    "embedding": "shared",
    "positions": "encoder.embed_positions",
    "token_types": "",
    "layer": "encoder.layers.{}.",
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "up": ("fc1",),
    "down": "fc2",
    "mlp_norm": "final_layer_norm",
}
#: The row of BART's learned position 0.
_OFFSET = 2


def _prepare_bart(config: Config) -> Config:
    """Copy the decoder's sizes to the field names of decoder-only models."""
    return {
        **config,
        "num_hidden_layers": config["decoder_layers"],
        "num_attention_heads": config["decoder_attention_heads"],
        "intermediate_size": config["decoder_ffn_dim"],
        "rms_norm_eps": 1e-5,
    }


def _bart_decoder(config: Config) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_bias": True,
        "gated": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rope": None,
        "num_positions": int(config["max_position_embeddings"]) + _OFFSET,
        "position_offset": _OFFSET,
        "embedding_scale": _scale(config),
        "cross": CrossAttentionSpec(length=int(config["max_position_embeddings"])),
    }


def _scale(config: Config) -> float:
    size = int(config["hidden_size"] if "hidden_size" in config else config["d_model"])
    return math.sqrt(size) if config.get("scale_embedding") else 1.0


def bart(config: Config) -> dict[str, Any]:
    """BART: norms after the residual is added.

    A norm is attributed to the part that reads its output: the one after self attention to cross
    attention, the one after the MLP to the next layer's attention.
    """
    last = int(config["num_hidden_layers"]) - 1
    cross = CrossAttentionSpec(
        length=int(config["max_position_embeddings"]), norm="self_attn_layer_norm"
    )
    return {
        **_bart_decoder(config),
        "wiring": "post",
        "cross": cross,
        "names": WeightNames(
            **_BART,
            embedding_norm="model.decoder.layernorm_embedding",
            attention_norm="final_layer_norm",
            mlp_norm="encoder_attn_layer_norm",
            final_norm=f"model.decoder.layers.{last}.final_layer_norm",
        ),
    }


def mbart(config: Config) -> dict[str, Any]:
    """mBART: norms before attention and MLP, and a norm after the last layer."""
    return {
        **_bart_decoder(config),
        "names": WeightNames(
            **_BART,
            embedding_norm="model.decoder.layernorm_embedding",
            attention_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            final_norm="model.decoder.layer_norm",
        ),
    }


def marian(config: Config) -> dict[str, Any]:
    """Marian: BART with sinusoidal positions and without a norm after the embedding."""
    refuse(config, share_encoder_decoder_embeddings=True)
    names = bart(config)["names"]
    return {
        **bart(config),
        "names": WeightNames(
            **_BART,
            attention_norm=names.attention_norm,
            mlp_norm=names.mlp_norm,
            final_norm=names.final_norm,
        ),
        "num_positions": 0,
        "position_offset": 0,
        # Checkpoints never generate the padding token, with which the decoder's input begins.
        "suppressed_tokens": (int(config["pad_token_id"]),),
    }


def m2m100(config: Config) -> dict[str, Any]:
    """M2M-100 and NLLB: mBART with sinusoidal positions and without a norm after the embedding."""
    return {
        **mbart(config),
        "names": WeightNames(
            **_BART,
            attention_norm="self_attn_layer_norm",
            mlp_norm="final_layer_norm",
            final_norm="model.decoder.layer_norm",
        ),
        "num_positions": 0,
        "position_offset": 0,
    }


def _prepare_t5(config: Config) -> Config:
    layers = config.get("num_decoder_layers")
    return {
        **config,
        "num_hidden_layers": config["num_layers"] if layers is None else layers,
        "hidden_size": config["d_model"],
        "head_dim": config["d_kv"],
        "intermediate_size": config["d_ff"],
        "hidden_act": _t5_activation(config)[0],
    }


def _t5_activation(config: Config) -> tuple[str, bool]:
    """Return the activation's name in checkpoints, and whether the MLP is gated."""
    first, _, last = str(config.get("feed_forward_proj") or "relu").rpartition("-")
    name = "gelu_new" if (first, last) == ("gated", "gelu") else last
    return str(config.get("dense_act_fn") or name), first == "gated"


def t5(config: Config) -> dict[str, Any]:
    """T5 (arXiv 1910.10683), its gated successors and mT5: relative position biases, unscaled
    attention scores.
    """
    gated = _t5_activation(config)[1]
    mlp = "layer.2.DenseReluDense."
    attention, across = "layer.0.SelfAttention.", "layer.1.EncDecAttention."
    scales = bool(config.get("scale_decoder_outputs", config["tie_word_embeddings"]))
    return {
        "rope": None,
        "gated": gated,
        "attention_scale": 1.0,
        "logit_scale": int(config["hidden_size"]) ** -0.5 if scales else 1.0,
        "relative_bias": RelativeBiasSpec(
            name="decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            num_buckets=int(config["relative_attention_num_buckets"]),
            max_distance=int(config["relative_attention_max_distance"]),
        ),
        "cross": CrossAttentionSpec(
            length=int(config["n_positions"]),
            bias=False,
            norm="layer.1.layer_norm",
            queries=f"{across}q",
            keys=f"{across}k",
            values=f"{across}v",
            output=f"{across}o",
        ),
        "names": WeightNames(
            embedding="shared",
            final_norm="decoder.final_layer_norm",
            layer="decoder.block.{}.",
            attention_norm="layer.0.layer_norm",
            mlp_norm="layer.2.layer_norm",
            qkv=(f"{attention}q", f"{attention}k", f"{attention}v"),
            o=f"{attention}o",
            up=(f"{mlp}wi_0", f"{mlp}wi_1") if gated else (f"{mlp}wi",),
            down=f"{mlp}wo",
        ),
    }


_BART_DEFAULTS = {"activation_function": "gelu", "tie_word_embeddings": True}
_M2M100_DEFAULTS = {"activation_function": "relu", "tie_word_embeddings": True}
_T5_DEFAULTS = {
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    # The length in training; relative biases also work for longer texts.
    "n_positions": 512,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
}
FAMILIES = {
    "BartForConditionalGeneration": Family(bart, _BART_DEFAULTS, _prepare_bart),
    "MBartForConditionalGeneration": Family(mbart, _BART_DEFAULTS, _prepare_bart),
    "M2M100ForConditionalGeneration": Family(m2m100, _M2M100_DEFAULTS, _prepare_bart),
    "MarianMTModel": Family(marian, _BART_DEFAULTS, _prepare_bart),
    "T5ForConditionalGeneration": Family(t5, _T5_DEFAULTS, _prepare_t5),
    "MT5ForConditionalGeneration": Family(t5, _T5_DEFAULTS, _prepare_t5),
}


def _bart_encoder(config: Config, **fields: Any) -> EncoderSpec:
    positions, names = int(config["max_position_embeddings"]), fields.pop("names", {})
    is_learned = not fields.get("sinusoids")
    return EncoderSpec(
        architecture=config["architectures"][0],
        hidden_size=int(config["d_model"]),
        num_layers=int(config["encoder_layers"]),
        num_heads=int(config["encoder_attention_heads"]),
        head_dim=int(config["d_model"]) // int(config["encoder_attention_heads"]),
        intermediate_size=int(config["encoder_ffn_dim"]),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=positions,
        names=EncoderNames(**_BART_ENCODER, **names),
        num_positions=positions + _OFFSET if is_learned else 0,
        position_offset=_OFFSET if is_learned else 0,
        embedding_scale=_scale(config),
        norm_eps=1e-5,
        activation=ACTIVATIONS[str(config.get("activation_function", "gelu"))],
        **fields,
    )


_EMBEDDING_NORM = {"embedding_norm": "encoder.layernorm_embedding"}


def _t5_encoder(config: Config) -> EncoderSpec:
    activation, gated = _t5_activation(config)
    attention, mlp = "layer.0.SelfAttention.", "layer.1.DenseReluDense."
    return EncoderSpec(
        architecture=config["architectures"][0],
        hidden_size=int(config["d_model"]),
        num_layers=int(config["num_layers"]),
        num_heads=int(config["num_heads"]),
        head_dim=int(config["d_kv"]),
        intermediate_size=int(config["d_ff"]),
        vocab_size=int(config["vocab_size"]),
        max_position_embeddings=int(config.get("n_positions") or 512),
        names=EncoderNames(
            prefix="",
            embedding="shared",
            positions="",
            token_types="",
            embedding_norm="",
            relative_bias=f"encoder.block.0.{attention}relative_attention_bias",
            final_norm="encoder.final_layer_norm",
            layer="encoder.block.{}.",
            qkv=(f"{attention}q", f"{attention}k", f"{attention}v"),
            o=f"{attention}o",
            attention_norm="layer.0.layer_norm",
            up=(f"{mlp}wi_0", f"{mlp}wi_1") if gated else (f"{mlp}wi",),
            down=f"{mlp}wo",
            mlp_norm="layer.1.layer_norm",
        ),
        relative_buckets=int(config.get("relative_attention_num_buckets") or 32),
        max_distance=int(config.get("relative_attention_max_distance") or 128),
        wiring="pre",
        norm="rms",
        norm_eps=float(config.get("layer_norm_epsilon") or 1e-6),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        attention_scale=1.0,
        activation=ACTIVATIONS[activation],
        gated=gated,
    )


_ENCODERS: dict[str, Callable[[Config], EncoderSpec]] = {
    "BartForConditionalGeneration": lambda c: _bart_encoder(c, names=_EMBEDDING_NORM),
    "MBartForConditionalGeneration": lambda c: _bart_encoder(
        c, names={**_EMBEDDING_NORM, "final_norm": "encoder.layer_norm"}, wiring="pre"
    ),
    "MarianMTModel": lambda c: _bart_encoder(c, names={"embedding_norm": ""}, sinusoids="marian"),
    "M2M100ForConditionalGeneration": lambda c: _bart_encoder(
        {**_M2M100_DEFAULTS, **c},
        names={"embedding_norm": "", "final_norm": "encoder.layer_norm"},
        wiring="pre",
        sinusoids="fairseq",
        first_position=int(c["pad_token_id"]) + 1,
    ),
    "T5ForConditionalGeneration": _t5_encoder,
    "MT5ForConditionalGeneration": _t5_encoder,
}


def text_encoder_spec(config: Config) -> EncoderSpec | None:
    """Return the encoder of a config.json; None if its architecture isn't one of this module.

    Raises `ModelLoadError` for an invalid config.
    """
    name = next((name for name in config.get("architectures") or () if name in _ENCODERS), None)
    if name is None:
        return None
    try:
        return _ENCODERS[name]({**config, "architectures": [name]})
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(
            f"config.json: the encoder of {name} can't be read: {error!r}."
        ) from error
