"""`EncoderSpec`: all that the native encoder needs to know of an architecture, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.contract.errors import ModelLoadError
from engine.models.families.common import ACTIVATIONS, Config, refuse
from engine.models.rotary_embedding import RopeSpec, rope_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of weights without `.weight`; the defaults are BERT's.

    `""` means that the family has no such weight. `layer` holds the layer's number as `{}`; names
    of a layer's weights are relative to it. One name in `qkv` or `up` is one tensor. `prefix` is
    left out by checkpoints of the bare model.
    """

    prefix: str = "bert."
    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    relative_bias: str = ""
    final_norm: str = ""

    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder's architecture. Sizes are in elements.

    Attributes:
        architecture: name in config.json.
        max_position_embeddings: longest sequence.
        num_positions, position_offset: rows of the learned table and the first token's row; 0 rows
            for families without one.
        sinusoids: positions are sines ("marian": see `sinusoidal_positions`), for families without
            a table of them; "": they aren't. `first_position`: of the first token.
        type_vocab_size: rows of the token type table, 0 for families without one.
        relative_buckets, max_distance: rows of the table of relative position biases (T5's
            scheme), or 0, and from which distance on all tokens are in its last bucket.
        embedding_scale: of the rows of the embedding table.
        wiring: "post": norm(residual + f(residual)), as in BERT; "pre": residual + f(norm(.)).
        first_norm: with "pre": whether the first layer has a norm before its attention.
        norm: LayerNorm or RMSNorm.
        norm_bias, qkv_bias, o_bias, mlp_bias: which of them have biases.
        attention_scale: of q.k with relative biases; 0: 1 / sqrt(head_dim).
        reach: layer i sees tokens at most this far away on either side, 0 for all.
        ropes: rotary embedding by layer; (): no rotation.
        activation: "gelu", "gelu_tanh", "silu" or "relu".
        gated: the MLP multiplies the activated half with another one.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    names: EncoderNames = field(default_factory=EncoderNames)
    num_positions: int = 0
    position_offset: int = 0
    sinusoids: Literal["", "marian", "fairseq"] = ""
    first_position: int = 0
    type_vocab_size: int = 0
    relative_buckets: int = 0
    max_distance: int = 128
    embedding_scale: float = 1.0
    wiring: Literal["post", "pre"] = "post"
    first_norm: bool = True
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-12
    norm_bias: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    attention_scale: float = 0.0
    reach: tuple[int, ...] = ()
    ropes: tuple[RopeSpec, ...] = ()
    activation: str = "gelu"
    gated: bool = False
    dtype: str = "float32"

    @property
    def num_parameters(self) -> int:
        """Parameters of the tables and the layers (norms and biases left out)."""
        matrices = 3 if self.gated else 2
        layer = 4 * self.num_heads * self.head_dim + matrices * self.intermediate_size
        tables = self.vocab_size + self.num_positions + self.type_vocab_size
        return (self.num_layers * layer + tables) * self.hidden_size

    @property
    def rope(self) -> RopeSpec | None:
        """No scaling of the context: positions are the trained ones."""
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Nothing is generated."""
        return ()

    @property
    def sliding_windows(self) -> tuple[int, ...]:
        """Sliding windows of the KV cache: there's none."""
        return ()

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Nothing of an encoder's tokens outlives their step."""
        return 0


_POSITIVE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def bert(config: Config) -> dict[str, Any]:
    """BERT: learned positions, token types, norms after the residual."""
    refuse(config, position_embedding_type="absolute", is_decoder=False)
    refuse(config, embedding_size=config["hidden_size"])
    return {
        "num_positions": int(config["max_position_embeddings"]),
        "type_vocab_size": int(config.get("type_vocab_size", 2)),
    }


def electra(config: Config) -> dict[str, Any]:
    """ELECTRA: BERT under another prefix (where the embedding is as wide as the layers)."""
    return {**bert(config), "names": EncoderNames(prefix="electra.")}


def roberta(config: Config) -> dict[str, Any]:
    """RoBERTa: BERT whose positions count from after the padding id."""
    padding = _padding(config)
    return {
        **bert(config),
        "names": EncoderNames(prefix="roberta."),
        "position_offset": padding + 1,
        "max_position_embeddings": int(config["max_position_embeddings"]) - padding - 1,
    }


def distilbert(config: Config) -> dict[str, Any]:
    """DistilBERT: BERT without token types, with different tensor names."""
    return {
        "num_positions": int(config["max_position_embeddings"]),
        "names": EncoderNames(
            prefix="distilbert.",
            token_types="",
            layer="transformer.layer.{}.",
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            o="attention.out_lin",
            attention_norm="sa_layer_norm",
            up=("ffn.lin1",),
            down="ffn.lin2",
            mlp_norm="output_layer_norm",
        ),
    }


def mpnet(config: Config) -> dict[str, Any]:
    """MPNet: RoBERTa's positions, and biases by relative position that all layers share."""
    padding = _padding(config)
    return {
        "num_positions": int(config["max_position_embeddings"]),
        "position_offset": padding + 1,
        "max_position_embeddings": int(config["max_position_embeddings"]) - padding - 1,
        "relative_buckets": int(config.get("relative_attention_num_buckets", 32)),
        "names": EncoderNames(
            prefix="mpnet.",
            token_types="",
            relative_bias="encoder.relative_attention_bias",
            qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            o="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
    }


def modernbert(config: Config) -> dict[str, Any]:
    """ModernBERT (arXiv 2412.13663): rotary, norms before, local and global layers."""
    layers = int(config["num_hidden_layers"])
    every = int(config.get("global_attn_every_n_layers", 3))
    types = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    reach = int(config.get("local_attention", 128)) // 2
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    thetas = {
        "full_attention": float(config.get("global_rope_theta") or 160_000.0),
        "sliding_attention": float(
            config.get("local_rope_theta") or config.get("global_rope_theta") or 10_000.0
        ),
    }
    ropes = {
        kind: rope_spec({**config, "rope_theta": theta}, head_dim, kind)
        for kind, theta in thetas.items()
    }
    bias = bool(config.get("attention_bias", False))
    return {
        "names": EncoderNames(
            prefix="model.",
            embedding="embeddings.tok_embeddings",
            positions="",
            token_types="",
            embedding_norm="embeddings.norm",
            final_norm="final_norm",
            layer="layers.{}.",
            qkv=("attn.Wqkv",),
            o="attn.Wo",
            attention_norm="attn_norm",
            up=("mlp.Wi",),
            down="mlp.Wo",
            mlp_norm="mlp_norm",
        ),
        "wiring": "pre",
        "first_norm": False,
        "norm_eps": float(config.get("norm_eps", 1e-5)),
        "norm_bias": bool(config.get("norm_bias", False)),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "reach": tuple(reach if kind == "sliding_attention" else 0 for kind in types),
        "ropes": tuple(ropes[kind] for kind in types),
        "gated": True,
    }


def nomic_bert(config: Config) -> dict[str, Any]:
    """NomicBERT (arXiv 2402.01613): BERT with rotary embedding and a gated MLP, no biases."""
    refuse(config, prenorm=False, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False)
    refuse(config, rotary_emb_fraction=1.0, rotary_emb_interleaved=False)
    head_dim = int(
        config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"])
    )
    rope = rope_spec({"rope_theta": 1000.0, **config}, head_dim)
    return {
        "head_dim": head_dim,
        "type_vocab_size": int(config.get("type_vocab_size", 2)),
        "names": EncoderNames(
            prefix="nomic_bert.",
            positions="",
            embedding_norm="emb_ln",
            layer="encoder.layers.{}.",
            qkv=("attn.Wqkv",),
            o="attn.out_proj",
            attention_norm="norm1",
            up=("mlp.fc12", "mlp.fc11"),
            down="mlp.fc2",
            mlp_norm="norm2",
        ),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "ropes": (rope,) * int(config["num_hidden_layers"]),
        "gated": True,
    }


#: `architectures` without its ending ("Model", "ForSequenceClassification", ...).
FAMILIES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "Bert": bert,
    "Electra": electra,
    "Roberta": roberta,
    "XLMRoberta": roberta,
    "Camembert": roberta,
    "DistilBert": distilbert,
    "MPNet": mpnet,
    "ModernBert": modernbert,
    "NomicBert": nomic_bert,
}
ENDINGS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
#: DistilBERT's and NomicBERT's names of common fields.
_ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
    "hidden_activation": "hidden_act",
}


def is_encoder(architecture: str) -> bool:
    """Whether the native encoder knows this architecture."""
    return any(architecture == family + ending for family in FAMILIES for ending in ENDINGS)


def encoder_spec(architecture: str, raw: Config) -> EncoderSpec:
    """The spec of a config.json. Raises `ModelLoadError` for what the encoder can't run."""
    family = next(f for f in FAMILIES if any(architecture == f + ending for ending in ENDINGS))
    renamed = {new: raw[old] for old, new in _ALIASES.items() if raw.get(old) is not None}
    config = {**{name: value for name, value in raw.items() if value is not None}, **renamed}
    try:
        spec = EncoderSpec(**{**_common(architecture, config), **FAMILIES[family](config)})
    except KeyError as error:
        reason = f"config.json of {architecture} lacks {error.args[0]!r}."
        raise ModelLoadError(reason) from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = f"config.json of {architecture} has a value of the wrong type: {error}."
        raise ModelLoadError(reason) from error
    _check(spec)
    return spec


def _common(architecture: str, config: Config) -> dict[str, Any]:
    """Return the fields that every family has under the same names."""
    activation = str(config.get("hidden_act", "gelu"))
    activation = {"swiglu": "silu"}.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ModelLoadError(
            f"config.json: hidden_act {activation!r} isn't supported.", param="hidden_act"
        )
    heads = int(config["num_attention_heads"])
    return {
        "architecture": architecture,
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": heads,
        "head_dim": int(config["hidden_size"]) // max(1, heads),
        "intermediate_size": int(config["intermediate_size"]),
        "vocab_size": int(config["vocab_size"]),
        "max_position_embeddings": int(config["max_position_embeddings"]),
        "norm_eps": float(config.get("layer_norm_eps", 1e-12)),
        "activation": ACTIVATIONS[activation],
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    }


def _padding(config: Config) -> int:
    return int(config.get("pad_token_id", 1))


def _check(spec: EncoderSpec) -> None:
    """Sizes that can't be are refused before anything is read or allocated."""
    for name in _POSITIVE:
        if getattr(spec, name) < 1:
            raise ModelLoadError(
                f"config.json of {spec.architecture}: {name} must be at least 1.", param=name
            )
    for name in ("reach", "ropes"):
        if getattr(spec, name) and len(getattr(spec, name)) != spec.num_layers:
            raise ModelLoadError(
                f"config.json of {spec.architecture}: layer_types names "
                f"{len(getattr(spec, name))} layers of {spec.num_layers}.",
                param="layer_types",
            )
