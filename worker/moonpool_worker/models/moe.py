"""Mixture of experts (Shazeer et al., 2017): each token goes through the few feed-forward layers that its router chose.

Tokens are sorted by expert, so that an expert's rows are one product; the results are put back in the order of the
tokens and summed there, not added up in place, so that the sum's order never depends on chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from moonpool_worker.kernels.interface import Kernels, Linear
from moonpool_worker.models.mlp import Activation, GatedMLP, mlp_shapes
from moonpool_worker.models.routing import Choice, Router
from moonpool_worker.weights.tensor_reader import TensorReader

#: What the matrices of an expert are called in most checkpoints.
_NAMES = ("gate_proj", "up_proj", "down_proj")


class GroupedLinear(Protocol):
    """One matrix per expert."""

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """``rows`` [N, in], sorted by expert, ``counts`` int64 [experts] of them for each → [N, out]."""
        ...


class LinearPerExpert:
    """A product for each expert that has rows: what a CPU does best, each matrix being packed."""

    def __init__(self, linears: Sequence[Linear], out: int) -> None:
        self._linears, self._out = linears, out

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(rows.shape[0], self._out)
        first = 0
        for linear, count in zip(self._linears, counts.tolist(), strict=True):
            if count:
                result[first : first + count] = linear(rows[first : first + count])
                first += count
        return result


class GroupedProduct:
    """All experts in one call, without asking the device how many rows each has. ``weight`` [experts, out, in],
    ``bias`` [experts, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight.transpose(1, 2), bias

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        product = torch._grouped_mm(rows, self._weight, offs=ends)
        if self._bias is None:
            return product
        return product + self._bias.repeat_interleave(counts, dim=0, output_size=rows.shape[0])


def grouped_linear(
    kernels: Kernels, count: int, weight: Callable[[int], torch.Tensor], bias: torch.Tensor | None = None
) -> GroupedLinear:
    """``weight(expert)`` [out, in] is read one by one: only one stands in memory twice. ``bias`` [count, out]."""
    first = weight(0)
    if first.device.type != "cpu":
        stacked = first.new_empty(count, *first.shape)
        for expert in range(count):
            stacked[expert] = weight(expert) if expert else first
        return GroupedProduct(stacked, bias)
    linears = [
        kernels.linear(weight(expert) if expert else first, None if bias is None else bias[expert])
        for expert in range(count)
    ]
    return LinearPerExpert(linears, first.shape[0])


class Experts:
    """The feed-forward layers among which a router chooses."""

    def __init__(self, gate_up: GroupedLinear, down: GroupedLinear, activation: Activation, count: int) -> None:
        self._gate_up, self._down, self._activation, self.count = gate_up, down, activation, count

    @classmethod
    def read(
        cls,
        reader: TensorReader,
        kernels: Kernels,
        prefix: str,
        count: int,
        *,
        names: tuple[str, str, str] = _NAMES,
        activation: Activation | None = None,
    ) -> Experts:
        """From the tensors of :func:`expert_shapes`."""
        gate, up, down = names

        def gate_up(expert: int) -> torch.Tensor:
            return reader.read(f"{prefix}{expert}.{gate}.weight", f"{prefix}{expert}.{up}.weight")

        return cls(
            grouped_linear(kernels, count, gate_up),
            grouped_linear(kernels, count, lambda expert: reader.read(f"{prefix}{expert}.{down}.weight")),
            activation or kernels.silu_mul,
            count,
        )

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """``x`` [T, hidden] → the weighted sum of the chosen experts' results, [T, hidden]."""
        tokens, top_k = choice.experts.shape
        slots = choice.experts.reshape(-1)
        order = slots.argsort(stable=True)
        counts = torch.bincount(slots, minlength=self.count)
        inner = self._activation(self._gate_up(x.index_select(0, order // top_k), counts))
        results = self._down(inner, counts)
        by_token = torch.empty_like(results).index_copy_(0, order, results).view(tokens, top_k, -1)
        # A product with float32 weights is float32: the sum is rounded once.
        return (by_token * choice.weights.unsqueeze(-1)).sum(1).to(x.dtype)


class MixtureOfExperts:
    """[T, hidden] → [T, hidden]: routed experts, and one that every token goes through (``shared``), if there is one,
    times the sigmoid of ``shared_gate`` (hidden → 1) where there is that."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: GatedMLP | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        self._router, self._experts = router, experts
        self._shared, self._shared_gate = shared, shared_gate

    def __call__(self, x: torch.Tensor, choice: Choice | None = None) -> torch.Tensor:
        """``choice`` where something else than the router chose."""
        routed = self._experts(x, choice or self._router(x))
        if self._shared is None:
            return routed
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = torch.sigmoid(F.linear(x, self._shared_gate)) * shared
        return routed + shared


def expert_shapes(
    prefix: str, count: int, hidden: int, ffn: int, names: tuple[str, str, str] = _NAMES
) -> dict[str, tuple[int, ...]]:
    """Tensors of ``count`` experts stored one by one, ``prefix`` + ``0.gate_proj.weight`` and so on."""
    renamed = dict(zip(_NAMES, names, strict=True))
    shapes: dict[str, tuple[int, ...]] = {}
    for expert in range(count):
        for name, shape in mlp_shapes("", hidden, ffn).items():
            shapes[f"{prefix}{expert}.{renamed[name.split('.')[0]]}.weight"] = shape
    return shapes
