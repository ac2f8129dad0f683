"""gpt-oss (OpenAI, 2025): sinks, a window in every other layer, YaRN, experts with a clamped gate.

The experts of a layer are stored together, transposed and with gate and up interleaved, in bfloat16 or float32; or, as
released, in MXFP4 without the transposition, and are then unpacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.decoder import Decoder, DecoderConfig, decoder_groups, decoder_shapes
from moonpool_worker.models.family import Family
from moonpool_worker.models.moe import Experts, MixtureOfExperts, grouped_linear
from moonpool_worker.models.mxfp4 import BLOCK, unpack_mxfp4
from moonpool_worker.models.read_config import decoder_fields
from moonpool_worker.models.routing import Router, Routing
from moonpool_worker.models.step import FeedForward
from moonpool_worker.models.windows import read_windows
from moonpool_worker.weights.tensor_reader import TensorReader


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """``swiglu_alpha``, ``swiglu_limit``: of :func:`clamped_swiglu`. ``packed``: the experts are in MXFP4."""

    experts: int
    routing: Routing
    swiglu_alpha: float
    swiglu_limit: float
    packed: bool


def read_config(raw: Mapping[str, Any]) -> GptOssConfig:
    packed = (raw.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    fields = decoder_fields({**raw, "quantization_config": None} if packed else raw)
    kinds = raw.get("layer_types") or [
        "full_attention" if number % 2 else "sliding_attention" for number in range(fields["layers"])
    ]
    bias = bool(raw.get("attention_bias", True))
    return GptOssConfig(
        architecture="gpt_oss",
        **fields,
        windows=read_windows(kinds, raw.get("sliding_window")),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        experts=raw["num_local_experts"],
        routing=Routing(top_k=raw["num_experts_per_tok"]),
        swiglu_alpha=float(raw.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(raw.get("swiglu_limit", 7.0)),
        packed=packed,
    )


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """[N, 2 * ffn] (gate, up) → gate sigmoid(alpha gate) (up + 1), [N, ffn], both held within ``limit``."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * alpha) * (up.clamp(-limit, limit) + 1)


def plain_shapes(config: GptOssConfig, number: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer's experts and router, as they stand in memory."""
    count, hidden, ffn = config.experts, config.hidden, config.ffn
    prefix = f"model.layers.{number}.mlp."
    return {
        f"{prefix}router.weight": (count, hidden),
        f"{prefix}router.bias": (count,),
        f"{prefix}experts.gate_up_proj": (count, hidden, 2 * ffn),
        f"{prefix}experts.gate_up_proj_bias": (count, 2 * ffn),
        f"{prefix}experts.down_proj": (count, ffn, hidden),
        f"{prefix}experts.down_proj_bias": (count, hidden),
    }


def stored_shapes(config: GptOssConfig, number: int) -> dict[str, tuple[int, ...]]:
    """The same as they stand in the checkpoint."""
    shapes = plain_shapes(config, number)
    if config.packed:
        for name in ("gate_up_proj", "down_proj"):
            plain = f"model.layers.{number}.mlp.experts.{name}"
            count, width, rows = shapes.pop(plain)
            shapes[f"{plain}_blocks"] = (count, rows, width // BLOCK, BLOCK // 2)
            shapes[f"{plain}_scales"] = (count, rows, width // BLOCK)
    return shapes


def read_feed_forward(config: GptOssConfig, reader: TensorReader, kernels: Kernels, number: int) -> FeedForward:
    prefix = f"model.layers.{number}.mlp."
    router = Router(
        config.routing,
        reader.read(f"{prefix}router.weight", dtype=torch.float32),
        logit_bias=reader.read(f"{prefix}router.bias", dtype=torch.float32),
    )
    gate_up, down = (
        _expert_reader(config, reader, f"{prefix}experts.{name}") for name in ("gate_up_proj", "down_proj")
    )
    gate_up_bias = reader.read(f"{prefix}experts.gate_up_proj_bias").t()
    experts = Experts(
        grouped_linear(
            kernels, config.experts, lambda expert: _apart(gate_up(expert)), _apart(gate_up_bias).t().contiguous()
        ),
        grouped_linear(kernels, config.experts, down, reader.read(f"{prefix}experts.down_proj_bias")),
        functools.partial(clamped_swiglu, alpha=config.swiglu_alpha, limit=config.swiglu_limit),
        config.experts,
    )
    return MixtureOfExperts(router, experts)


def _expert_reader(config: GptOssConfig, reader: TensorReader, name: str) -> Callable[[int], torch.Tensor]:
    """Of all experts' matrices the one of an expert, [out, in]."""
    if not config.packed:
        stacked = reader.read(name)
        return lambda expert: stacked[expert].t().contiguous()
    blocks = reader.read(f"{name}_blocks", dtype=torch.uint8)
    scales = reader.read(f"{name}_scales", dtype=torch.uint8)
    return lambda expert: unpack_mxfp4(blocks[expert], scales[expert], reader.dtype)


def _apart(interleaved: torch.Tensor) -> torch.Tensor:
    """Rows gate, up, gate, up, … → all of gate, then all of up."""
    return torch.cat([interleaved[::2], interleaved[1::2]])


FAMILY = Family(
    model_types=("gpt_oss",),
    read_config=read_config,
    tensor_shapes=functools.partial(decoder_shapes, feed_forward=stored_shapes),
    groups=decoder_groups,
    build=functools.partial(Decoder, shapes=plain_shapes, feed_forward=read_feed_forward),
)
