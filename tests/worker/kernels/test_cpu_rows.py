"""Norms, rotation and activations of the C++ backend against the torch backend in float32."""

from __future__ import annotations

import pytest
import torch
from moonpool_worker.kernels.torch_backend import TorchKernels

from tests.worker.kernels.cpu_case import cpu_kernels


def assert_rounded(found: torch.Tensor, wide: torch.Tensor) -> None:
    """One rounding to bfloat16 away from the float32 result."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wide, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("width", [16, 50, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms(width: int, dtype: torch.dtype) -> None:
    kernels, reference = cpu_kernels(), TorchKernels()
    x, residual, weight = (torch.randn(shape).bfloat16() for shape in ((70, width), (70, width), (width,)))
    assert_rounded(kernels.rms_norm(x, weight.to(dtype), 1e-5), reference.rms_norm(x.float(), weight.float(), 1e-5))
    heads = x[:, None].expand(70, 3, width)
    assert torch.equal(kernels.rms_norm(heads, weight, 1e-5)[:, 2], kernels.rms_norm(x, weight, 1e-5))
    total = residual + x
    normed, kept = kernels.add_rms_norm(x, residual.clone(), weight.to(dtype), 1e-5)
    assert torch.equal(kept, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dim", [2, 32, 80, 128, 256])
def test_rope(dim: int) -> None:
    kernels, reference = cpu_kernels(), TorchKernels()
    x, angle = torch.randn(37, 5, dim).bfloat16(), torch.rand(37, 1, dim // 2) * 6
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    found = kernels.rope(x[:, 1:4], cos, sin).float()
    expected = reference.rope(x[:, 1:4].float(), cos.float(), sin.float())
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-7)


def test_silu_mul() -> None:
    kernels, x = cpu_kernels(), torch.randn(41, 130).mul(8).bfloat16()
    assert_rounded(kernels.silu_mul(x), TorchKernels().silu_mul(x.float()))


@pytest.mark.parametrize("value", [0.0, -300.0, 300.0, float("inf")])
def test_silu_at_the_ends(value: float) -> None:
    x = torch.tensor([[value, 1.0]]).bfloat16()
    assert cpu_kernels().silu_mul(x).float().item() == pytest.approx(max(value, 0.0), abs=1e-30)


def test_float32_goes_torchs_way() -> None:
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(cpu_kernels().rms_norm(x, weight, 1e-5), TorchKernels().rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("width", [1, 15, 16, 49_152, 49_157])
def test_argmax(width: int) -> None:
    logits = torch.randint(-1000, 1000, (9, width)).float()
    logits[3] = -float("inf")
    assert cpu_kernels().argmax(logits) == TorchKernels().argmax(logits)
