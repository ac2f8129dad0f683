"""What a DeepSeek-V4 configuration says, new style (transformers) and old (DeepSeek's own names)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.read_config import refuse_quantised
from moonpool_worker.models.rope import Scaling, read_scaling
from moonpool_worker.models.routing import Routing, Score

#: What a layer sees besides the last tokens: nothing; an entry for every few of them, of which an indexer chooses
#: (compressed sparse attention); an entry for every hundred or so (heavily compressed attention).
Kind = Literal["window", "csa", "hca"]

_KINDS: dict[str, Kind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_SCORES: dict[str, Score] = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config(ModelConfig):
    """``kinds`` and ``hashed`` (experts by token id, not by a router) are per layer. ``rope``: how many of a head's
    last numbers are rotated; ``rope_theta`` is for layers without compression, ``compressed_theta`` and
    ``rope_scaling`` for the others. ``strides``: tokens per entry. ``streams``: parallel residuals."""

    kinds: tuple[Kind, ...]
    hashed: tuple[bool, ...]
    heads: int
    head_dim: int
    rope: int
    compressed_theta: float
    q_rank: int
    out_groups: int
    out_rank: int
    window: int
    strides: Mapping[Kind, int]
    index_heads: int
    index_dim: int
    index_top_k: int
    experts: int
    expert_ffn: int
    routing: Routing
    activation_limit: float
    streams: int
    sinkhorn_steps: int
    streams_eps: float

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def read_config(raw: Mapping[str, Any]) -> DeepseekV4Config:
    refuse_quantised(raw)
    if raw.get("attention_bias") or raw.get("mlp_bias"):
        raise ValueError("biases in attention or feed-forward layers")
    if raw.get("n_shared_experts", 1) != 1:
        raise ValueError(f"{raw['n_shared_experts']} shared experts in place of one")
    score = raw.get("scoring_func", "sqrtsoftplus")
    if score not in _SCORES:
        raise ValueError(f"scores of experts by {score!r}")
    layers, head_dim = raw["num_hidden_layers"], raw["head_dim"]
    theta, compressed_theta, scaling = _rope(raw)
    rates = raw.get("compress_rates") or {}
    strides: dict[Kind, int] = {
        "csa": raw.get("compress_rate_csa") or rates.get("compressed_sparse_attention", 4),
        "hca": raw.get("compress_rate_hca") or rates.get("heavily_compressed_attention", 128),
    }
    return DeepseekV4Config(
        architecture="deepseek_v4",
        layers=layers,
        hidden=raw["hidden_size"],
        vocab=raw["vocab_size"],
        context_length=raw["max_position_embeddings"],
        rope_theta=theta,
        # The second theta is part of the KV namespace with this.
        rope_scaling={**scaling, "compressed_theta": compressed_theta},
        norm_eps=float(raw["rms_norm_eps"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        kinds=_kinds(raw, layers, strides),
        hashed=_hashed(raw, layers),
        heads=raw["num_attention_heads"],
        head_dim=head_dim,
        rope=raw.get("qk_rope_head_dim") or int(head_dim * (raw.get("partial_rotary_factor") or 1 / 8)),
        compressed_theta=compressed_theta,
        q_rank=raw["q_lora_rank"],
        out_groups=raw["o_groups"],
        out_rank=raw["o_lora_rank"],
        window=raw["sliding_window"],
        strides=strides,
        index_heads=raw["index_n_heads"],
        index_dim=raw["index_head_dim"],
        index_top_k=raw["index_topk"],
        experts=raw["n_routed_experts"],
        expert_ffn=raw["moe_intermediate_size"],
        routing=Routing(
            top_k=raw["num_experts_per_tok"],
            score=_SCORES[score],
            scale=float(raw.get("routed_scaling_factor", 1.5)),
        ),
        activation_limit=float(raw["swiglu_limit"]),
        streams=raw["hc_mult"],
        sinkhorn_steps=raw["hc_sinkhorn_iters"],
        streams_eps=float(raw["hc_eps"]),
    )


def _rope(raw: Mapping[str, Any]) -> tuple[float, float, Scaling]:
    """Theta without and with compression, and how the latter is stretched."""
    given = raw.get("rope_parameters") or {}
    plain, compressed = given.get("main"), given.get("compress")
    if plain is None or compressed is None:
        plain = {"rope_theta": raw.get("rope_theta", 10000.0)}
        compressed = {**given, **(raw.get("rope_scaling") or {}), "rope_theta": raw["compress_rope_theta"]}
    scaling = read_scaling(compressed, int(raw["max_position_embeddings"]))
    if scaling:
        # V4 stretches without YaRN's temperature unless it is given.
        scaling.setdefault("attention_factor", 1.0)
    return float(plain["rope_theta"]), float(compressed["rope_theta"]), scaling


def _kinds(raw: Mapping[str, Any], layers: int, strides: Mapping[Kind, int]) -> tuple[Kind, ...]:
    if raw.get("layer_types") is not None:
        given, known = raw["layer_types"], _KINDS
    else:
        by_ratio: dict[Any, Kind] = {0: "window", strides["csa"]: "csa", strides["hca"]: "hca"}
        given, known = raw["compress_ratios"], by_ratio
    unknown = set(given) - known.keys()
    if unknown:
        raise ValueError(f"layers of type {min(unknown)!r}")
    kinds = tuple(known[kind] for kind in given)
    if len(kinds) < layers:
        raise ValueError(f"{len(kinds)} kinds for {layers} layers")
    # More than there are layers: those of the part that predicts several tokens, which is not loaded.
    return kinds[:layers]


def _hashed(raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = raw.get("mlp_layer_types")
    if types is None:
        count = raw.get("num_hash_layers", 3)
        return tuple(number < count for number in range(layers))
    unknown = set(types) - {"hash_moe", "moe"}
    if unknown:
        raise ValueError(f"feed-forward layers of type {sorted(unknown)[0]!r}")
    return tuple(kind == "hash_moe" for kind in types)
