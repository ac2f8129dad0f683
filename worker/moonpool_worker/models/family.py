"""What a model family declares: one object per file in ``families/``, and nothing else knows its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from moonpool_api.geometry import CacheGeometry, GroupGeometry

from moonpool_worker.engine.batch import StepBatch
from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.weights.tensor_reader import TensorReader


class Cache(Protocol):
    """The arena, as a forward pass sees it."""

    geometry: CacheGeometry

    def view(self, group: int, layer: int, plane: str) -> torch.Tensor:
        """One plane of one layer: ``[blocks, rows, *row]`` (history) or ``[blocks, *shape]`` (state)."""
        ...


class Model(Protocol):
    """Weights and forward pass. ``weight_bytes``: what the weights take in memory."""

    config: Any
    dtype: torch.dtype

    @property
    def weight_bytes(self) -> int: ...

    def forward(self, batch: StepBatch, cache: Cache) -> torch.Tensor:
        """float32 logits [chunks that want them, vocab], in batch order; rows and states of the step are in ``cache``
        afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """How GGUF files store a family.

    ``config(get)``: the same dictionary that a ``config.json`` would hold, from GGUF fields without their prefix
    (``get("block_count")``, with an optional default; without one a missing field is a load error). ``layer`` and
    ``top`` map tensor names to Hugging Face's, ``layer`` without ``blk.N.``; a name with ``{expert}`` is that of a
    tensor in which a layer's experts are stacked. ``undo(name, config)`` gives the function that undoes what the
    export did to a tensor's rows, or None.
    """

    architecture: str
    config: Callable[[Callable[..., Any]], dict[str, Any]]
    layer: Mapping[str, str]
    top: Mapping[str, str]
    undo: Callable[[str, ModelConfig], Callable[[np.ndarray], np.ndarray] | None] = lambda name, config: None


@dataclass(frozen=True, slots=True)
class Family:
    """``model_types``: values of ``model_type`` in ``config.json``.

    ``read_config(raw)`` raises KeyError for what is missing and ValueError, with one sentence, for what is not
    supported. ``groups(config, dtype, granularity)``: the cache groups of a model whose KV has ``dtype`` (``float32``
    or ``bfloat16``); each group's ``block_tokens`` divides ``granularity``, ValueError when that cannot be.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    tensor_shapes: Callable[[Any], dict[str, tuple[int, ...]]]
    groups: Callable[[Any, str, int], tuple[GroupGeometry, ...]]
    build: Callable[[Any, TensorReader, Kernels], Model]
    gguf: tuple[GGUFForm, ...] = field(default=())
    #: Tensors of published checkpoints that serving does not need, by name (a head that predicts several tokens).
    unused: Callable[[Any, str], bool] = lambda config, name: False
