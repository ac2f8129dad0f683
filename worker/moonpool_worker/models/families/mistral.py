"""Mistral: llama in which all layers look back over a window, if the configuration has one (Jiang et al., 2023).

GGUF files of Mistral are of architecture llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool_worker.models.decoder import Decoder, DecoderConfig, decoder_groups, decoder_shapes
from moonpool_worker.models.family import Family
from moonpool_worker.models.read_config import decoder_fields, layer_types
from moonpool_worker.models.windows import read_windows


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    windows = read_windows(layer_types(raw, 0), raw.get("sliding_window"))
    return DecoderConfig(architecture="mistral", **decoder_fields(raw), windows=windows)


FAMILY = Family(
    model_types=("mistral",),
    read_config=read_config,
    tensor_shapes=decoder_shapes,
    groups=decoder_groups,
    build=Decoder,
)
