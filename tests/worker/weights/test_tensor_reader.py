"""Which tensors a checkpoint may hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from moonpool_worker.models.registry import families
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.tensor_reader import TensorReader


class Tensors:
    """A checkpoint of vectors of one element."""

    def __init__(self, *names: str) -> None:
        self._names = list(names)

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return (1,)

    def size(self, name: str) -> int:
        return 4

    def rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, torch.ones(1)


def read(checkpoint: Tensors, family: str, config: object) -> torch.Tensor:
    unused = families()[family].unused
    shapes = {"model.norm.weight": (1,)}
    with TensorReader(
        checkpoint,  # type: ignore[arg-type]
        shapes,
        torch.float32,
        unused=lambda name: unused(config, name),
    ) as reader:
        return reader.read("model.norm.weight")


def test_a_tensor_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"not supported, model\.bias among them"):
        read(Tensors("model.norm.weight", "model.bias"), "llama", None)


class Config:
    layers = 61


@pytest.mark.parametrize(
    ("family", "name"),
    [("deepseek_v3", "model.layers.61.eh_proj.weight"), ("qwen3_next", "mtp.fc.weight")],
)
def test_a_head_for_several_tokens_is_left_out(family: str, name: str) -> None:
    assert read(Tensors("model.norm.weight", name), family, Config).item() == 1
    with pytest.raises(ModelLoadError, match="not supported"):
        read(Tensors("model.norm.weight", "model.layers.60.strange"), family, Config)
