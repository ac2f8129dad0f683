"""Products of the C++ backend against the weights' exact values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from moonpool_worker.kernels.packed_linear import PackedLinear, PlainLinear
from moonpool_worker.weights.quantised import QuantisedMatrix

from tests.worker.kernels.cpu_case import cpu_kernels


def quantised(kind: str, rows: int, columns: int) -> QuantisedMatrix:
    values = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    # Two parts, as when gate and up are stacked.
    return QuantisedMatrix(kind, (blocks[: rows // 2], blocks[rows // 2 :].copy()), (rows, columns))


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | float = 0.0) -> None:
    """Within float32's sums of ``columns`` products, and one rounding to bfloat16."""
    expected = x.double() @ weight.double().t() + bias
    size = x.double().abs() @ weight.double().abs().t()
    assert ((y.double() - expected).abs() <= expected.abs() * 2**-8 + size * 1e-6).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (50, 96), (256, 544)])
def test_blocks_of_a_file_are_multiplied_exactly(kind: str, rows: int, columns: int) -> None:
    kernels, weight = cpu_kernels(), quantised(kind, rows, columns)
    linear = kernels.linear(weight, torch.arange(rows).bfloat16())
    for tokens in (1, 3, 8, 12, 13, 25, 100):
        x = torch.randn(tokens, columns).bfloat16()
        assert_product(linear(x), x, weight.dense(torch.float64), torch.arange(rows).bfloat16().double())


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (49, 160), (640, 288)])
def test_bfloat16_weights(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns).bfloat16()
    linear = cpu_kernels().linear(weight)
    for tokens in (1, 2, 12, 37):
        x = torch.randn(tokens, columns).bfloat16()
        assert_product(linear(x), x, weight)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "bfloat16"])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: str) -> None:
    weight = torch.randn(96, 320).bfloat16() if kind == "bfloat16" else quantised(kind, 96, 320)
    linear = cpu_kernels().linear(weight)
    x = torch.randn(70, 320).bfloat16()
    together = linear(x)
    for first, last in [(0, 1), (69, 70), (3, 8), (5, 17), (10, 61)]:
        assert torch.equal(linear(x[first:last]), together[first:last])


def test_rows_may_lie_apart() -> None:
    kernels, weight = cpu_kernels(), torch.randn(48, 64).bfloat16()
    x = torch.randn(9, 200).bfloat16()
    assert torch.equal(kernels.linear(weight)(x[:, 32:96]), kernels.linear(weight)(x[:, 32:96].contiguous()))


def test_int8_is_half_a_step_from_the_weight() -> None:
    weight = torch.randn(64, 128).bfloat16()
    linear = cpu_kernels(int8=True).linear(weight)
    rounded = linear(torch.eye(128).bfloat16()).t().double()
    step = weight.double().view(64, 4, 32).abs().amax(-1, keepdim=True) / 127
    difference = (rounded - weight.double()).view(64, 4, 32).abs()
    # Half a step, the scale's own rounding over 127 steps, and the output's.
    assert (difference <= step * (0.5 + 127 * 2**-11) + rounded.view(64, 4, 32).abs() * 2**-8).all()
    assert difference.max() > 0


@pytest.mark.parametrize("weight", [torch.randn(32, 40).bfloat16(), torch.randn(32, 64)], ids=["columns", "float32"])
def test_what_cannot_be_packed_goes_torchs_way(weight: torch.Tensor) -> None:
    assert isinstance(cpu_kernels().linear(weight), PackedLinear | PlainLinear)
