"""The families that there are, found by looking into ``families/``, and the one call that loads a model."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import torch
from moonpool_api.geometry import CacheGeometry

from moonpool_worker.kernels.interface import Kernels
from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.dtype import resolve_dtype
from moonpool_worker.models.family import Family, GGUFForm, Model
from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.tensor_reader import Progress, TensorReader


@functools.cache
def families() -> dict[str, Family]:
    """Families by ``model_type``."""
    from moonpool_worker.models import families as package

    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        family: Family = importlib.import_module(f"{package.__name__}.{module.name}").FAMILY
        found |= dict.fromkeys(family.model_types, family)
    return found


def gguf_forms() -> dict[str, tuple[Family, GGUFForm]]:
    """Families and their GGUF forms by GGUF architecture."""
    return {form.architecture: (family, form) for family in families().values() for form in family.gguf}


def family_of(config: ModelConfig) -> Family:
    return families()[config.architecture]


def geometry(config: ModelConfig, dtype: str, prefix_granularity: int) -> CacheGeometry:
    """The shape of a model's cache. ValueError when the granularity does not suit one of its groups."""
    groups = family_of(config).groups(config, dtype, prefix_granularity)
    return CacheGeometry(prefix_granularity=prefix_granularity, groups=groups)


@torch.inference_mode()
def load_model(checkpoint: Checkpoint, dtype: str, kernels: Kernels, progress: Progress | None = None) -> Model:
    """The checkpoint's model with its weights in memory.

    ``dtype``: auto, float32 or bfloat16. ``progress(done, total)`` counts the checkpoint's bytes. Raises
    ModelLoadError.
    """
    config = checkpoint.config
    family = family_of(config)
    wanted = resolve_dtype(dtype)
    formats = kernels.formats if wanted == torch.bfloat16 else frozenset()
    with TensorReader(
        checkpoint,
        family.tensor_shapes(config),
        wanted,
        progress,
        formats,
        kernels.device,
        lambda name: family.unused(config, name),
    ) as reader:
        return family.build(config, reader, kernels)
