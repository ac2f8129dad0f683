"""GGUF files: metadata, tokenizer, and tensors dequantised a few rows at a time.

Block dequantisation is the ``gguf`` package's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moonpool_worker.models.config import ModelConfig
from moonpool_worker.models.family import Family, GGUFForm
from moonpool_worker.tokenizer.from_gguf import tokenizer_from_gguf
from moonpool_worker.tokenizer.tokenizer import Tokenizer
from moonpool_worker.weights.digest import PinnedFile, digest_of
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.gguf_reader import GGUFError, GGUFReader, TensorInfo, is_quantised

#: Elements that are dequantised at once: 8 MB in float32.
_SLICE = 2 << 20


class GGUFCheckpoint:
    """Raises ModelLoadError for a file that is no GGUF, is cut short, or holds an unsupported architecture."""

    def __init__(self, path: Path) -> None:
        self._file = PinnedFile(path)
        self._mapped = self._file.map()
        try:
            self._reader = GGUFReader(self._mapped)
        except GGUFError as fault:
            raise ModelLoadError(f"{path} is not a complete GGUF file: {fault}") from fault
        family, self._form = _form(self._field, path)
        self._tensors = {
            own: part for name, tensor in self._reader.tensors.items() for own, part in _named(name, tensor, self._form)
        }
        self.config = _config(self._field, path, family, self._form, "lm_head.weight" not in self._tensors)

    def _field(self, key: str, default: Any = None) -> Any:
        return self._reader.fields.get(key, default)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self._field)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def size(self, name: str) -> int:
        return self._tensors[name].nbytes

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        tensor = self._tensors[name]
        undo = self._form.undo(name, self.config)
        count, width = tensor.shape[0], math.prod(tensor.shape[1:])
        step = max(1, _SLICE // width) if undo is None and len(tensor.shape) > 1 else count
        for first in range(0, count, step):
            try:
                values = self._reader.dequantised(tensor, first, step)
            except NotImplementedError as fault:
                raise ModelLoadError(
                    f"{self._file.path} has {name} as {tensor.kind.name}, which is not supported"
                ) from fault
            yield first, torch.from_numpy(undo(values) if undo else values)

    def blocks(self, name: str) -> tuple[str, np.ndarray] | None:
        tensor = self._tensors[name]
        if len(tensor.shape) != 2 or not is_quantised(tensor.kind):
            return None
        # Moving rows is all that exports do to matrices, so it is undone in the same way on their blocks.
        undo, raw = self._form.undo(name, self.config), self._reader.raw(tensor)
        return tensor.kind.name, np.ascontiguousarray(undo(raw)) if undo else raw

    def digest(self) -> str:
        digest = digest_of([(self._file.path.name, self._file)], single=True)
        self._file.check_unchanged()
        return digest

    def close(self) -> None:
        self._tensors = {}
        self._mapped.close()
        self._file.close()


def _name(name: str, form: GGUFForm) -> str:
    if name in form.top:
        return form.top[name]
    prefix, number, rest = [*name.split(".", 2), "", ""][:3]
    if prefix == "blk" and rest in form.layer:
        return f"model.layers.{number}.{form.layer[rest]}"
    return name


def _named(name: str, tensor: TensorInfo, form: GGUFForm) -> Iterator[tuple[str, TensorInfo]]:
    """A tensor under Hugging Face's name; one that stacks the experts of a layer as a tensor for each of them."""
    own = _name(name, form)
    if "{expert}" not in own:
        yield own, tensor
        return
    count, *shape = tensor.shape
    size = tensor.nbytes // count
    for expert in range(count):
        part = TensorInfo(tuple(shape), tensor.kind, tensor.offset + expert * size, size)
        yield own.replace("{expert}", str(expert)), part


def _form(field: Any, path: Path) -> tuple[Family, GGUFForm]:
    # Imported here: families read tensors, and so know this package.
    from moonpool_worker.models.registry import gguf_forms

    architecture = str(field("general.architecture", ""))
    forms = gguf_forms()
    if architecture not in forms:
        raise ModelLoadError(
            f"{path} is of architecture {architecture!r}, which is not supported; supported: {', '.join(sorted(forms))}"
        )
    return forms[architecture]


def _config(field: Any, path: Path, family: Family, form: GGUFForm, tied: bool) -> ModelConfig:
    def get(key: str, default: Any = None) -> Any:
        value = field(f"{form.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{path} lacks {form.architecture}.{key}")
        return value

    tokens = field("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{path} holds no tokenizer")
    try:
        raw = form.config(get) | {
            "model_type": family.model_types[0],
            "vocab_size": len(tokens),
            "tie_word_embeddings": tied,
        }
        return family.read_config(raw)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as fault:
        raise ModelLoadError(f"{path} describes what is not supported: {fault}") from fault
