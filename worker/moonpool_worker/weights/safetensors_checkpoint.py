"""Hugging Face folders: ``config.json``, ``tokenizer.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moonpool_worker.models.config import ModelConfig
from moonpool_worker.tokenizer.from_folder import TOKENIZER_FILES, tokenizer_from_folder
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.digest import PinnedFile, digest_of
from moonpool_worker.weights.errors import ModelLoadError

_SLICE = 2 << 20


class SafetensorsCheckpoint:
    """Raises ModelLoadError for a folder that lacks files, a broken file, or an unsupported architecture."""

    def __init__(self, path: Path) -> None:
        self._path = path
        shards = sorted(path.glob("*.safetensors"))
        others = [path / name for name in ("config.json", *TOKENIZER_FILES) if (path / name).exists()]
        self._files = [(file.name, PinnedFile(file)) for file in [*others, *shards]]
        self.config = _config(path)
        self._shards = {}
        self._where: dict[str, str] = {}
        for name, file in self._files:
            if not name.endswith(".safetensors"):
                continue
            try:
                shard = safe_open(file.path_of_descriptor, framework="pt")
            except (SafetensorError, OSError) as fault:
                raise ModelLoadError(f"{path / name} is not a complete safetensors file: {fault}") from fault
            self._shards[name] = shard
            self._where |= dict.fromkeys(shard.keys(), name)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_folder(self._path)

    def names(self) -> list[str]:
        return list(self._where)

    def _slice(self, name: str) -> Any:
        return self._shards[self._where[name]].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def size(self, name: str) -> int:
        count = 1
        for size in self.shape(name):
            count *= size
        return count * (4 if self._slice(name).get_dtype() == "F32" else 2)

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        shape, values = self.shape(name), self._slice(name)
        if len(shape) == 1:
            yield 0, values[:]
            return
        step = max(1, _SLICE // math.prod(shape[1:]))
        for first in range(0, shape[0], step):
            yield first, values[first : first + step]

    def blocks(self, name: str) -> None:
        """Never: these files hold plain numbers."""

    def digest(self) -> str:
        digest = digest_of(self._files, single=False)
        for _, file in self._files:
            file.check_unchanged()
        return digest

    def close(self) -> None:
        self._shards = {}
        for _, file in self._files:
            file.close()


def _config(path: Path) -> ModelConfig:
    try:
        raw = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelLoadError(f"{path / 'config.json'} cannot be read: {fault}") from fault
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path / 'config.json'} is not a JSON object")
    architecture = str(raw.get("model_type", ""))
    # Imported here: families read tensors, and so know this package.
    from moonpool_worker.models.registry import families

    family = families().get(architecture)
    if family is None:
        supported = ", ".join(sorted(families()))
        raise ModelLoadError(
            f"{path} is of architecture {architecture!r}, which is not supported; supported: {supported}"
        )
    try:
        return family.read_config(raw)
    except KeyError as missing:
        raise ModelLoadError(f"{path / 'config.json'} lacks {missing}") from missing
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as fault:
        raise ModelLoadError(f"{path / 'config.json'} describes what is not supported: {fault}") from fault
