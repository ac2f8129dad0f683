"""Norms, RoPE, activations, stored rows and sampling of the Triton backend, in its interpreter."""

from __future__ import annotations

import pytest
import torch
from moonpool_worker.kernels.torch_backend import TorchKernels
from moonpool_worker.kernels.torch_sampling import exponential_noise
from moonpool_worker.kernels.torch_sampling import sample as torch_sample
from moonpool_worker.kernels.triton.backend import TritonKernels

from tests.worker.kernels.paged_steps import make_step

pytestmark = pytest.mark.interpreter

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}
TORCH, TRITON = TorchKernels(), TritonKernels()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=10 * tolerance)


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("shape", [(5, 64), (3, 576), (1, 5000), (4, 3, 80), (0, 64)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(TRITON.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_that_are_part_of_a_row(dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(7, 9, 32).to(dtype), torch.randn(32).to(dtype)
    close(TRITON.rms_norm(qkv[:, 2:6], weight, 1e-5), TORCH.rms_norm(qkv[:, 2:6], weight, 1e-5))


def test_rms_norm_with_the_residual_sum(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    expected = TORCH.add_rms_norm(x, residual.clone(), weight, 1e-5)
    normed, total = TRITON.add_rms_norm(x, residual, weight, 1e-5)
    close(normed, expected[0])
    assert torch.equal(total, expected[1])


@pytest.mark.parametrize("dim", [32, 80])
def test_rope_of_part_of_a_row(dim: int, dtype: torch.dtype) -> None:
    qkv, angle = torch.randn(6, 7, dim).to(dtype), torch.rand(6, 1, dim // 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    close(TRITON.rope(qkv[:, :5], cos, sin), TORCH.rope(qkv[:, :5], cos, sin))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("width", [48, 1500])
def test_gated_activations(width: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(4, 2 * width).to(dtype) * 3
    close(TRITON.silu_mul(gate_up), TORCH.silu_mul(gate_up))
    close(TRITON.gelu_mul(gate_up), TORCH.gelu_mul(gate_up))


@pytest.mark.parametrize("dense", [True, False])
def test_rows_are_stored_where_the_tables_say(dense: bool, dtype: torch.dtype) -> None:
    step = make_step([(5, 1), (0, 9)], rows=[(3, 40)] * 2, heads=3, dtype=dtype, scale=1.0, dense=dense)
    stored = []
    for kernels in (TORCH, TRITON):
        plan = kernels.plan(step.chunks, 0, step.group, torch.device("cpu"))
        cache = torch.zeros_like(step.caches[0].clone()) if dense else torch.zeros(400, 8, 3, 40, dtype=dtype)[:, :4]
        # A slice of wider rows, as the keys of a qkv product are.
        wide = torch.cat([step.new[0], step.new[0]], dim=1)
        kernels.write_rows(plan, cache, wide[:, 3:])
        stored.append(cache)
    assert torch.equal(*stored)
    assert int(stored[0].abs().sum(dim=(2, 3)).count_nonzero()) == 10


def draw(kernels: TorchKernels | TritonKernels | None, logits: torch.Tensor, settings: list[tuple]) -> torch.Tensor:
    temperature, top_k, top_p, seeds, draws = zip(*settings, strict=True)
    sample = torch_sample if kernels is None else kernels.sample
    return sample(
        logits,
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(seeds, dtype=torch.int64),
        torch.tensor(draws, dtype=torch.int32),
    )


@pytest.mark.parametrize("vocab, dtype", [(50, torch.float32), (50, torch.float16), (5000, torch.float32)], ids=str)
def test_sampling_draws_the_reference_s_tokens(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # temperature, top-k, top-p, seed, draw
    settings = [
        (0.0, 0, 1.0, 1, 0),
        (1.0, 0, 1.0, 2, 0),
        (1.0, 0, 1.0, 2, 1),
        (0.7, 5, 1.0, -3, 7),
        (1.0, 0, 0.5, 2**62 + 1, 9),
        (1.5, 20, 0.9, 5, 100_000),
        (1.0, 1, 1.0, 6, 0),
        (1.0, 0, 0.0, 7, 0),
        (2.0, vocab, 0.999, 8, 3),
    ]
    logits = (torch.randn(len(settings), vocab) * 4).to(dtype)
    assert torch.equal(draw(TRITON, logits, settings), draw(None, logits, settings))


def test_sampling_takes_ties_and_minus_infinity() -> None:
    logits = torch.full((6, 40), float("-inf"))
    logits[:, 7:10] = 2.0
    logits[:, 30] = -1.0
    settings = [(1.0, 2, 1.0, seed, 0) for seed in range(3)] + [(1.0, 0, 0.3, seed, 0) for seed in range(3)]
    tokens = draw(TRITON, logits, settings)
    assert torch.equal(tokens, draw(None, logits, settings))
    assert set(tokens.tolist()) <= {7, 8, 9}
    assert draw(TRITON, logits[:1], [(0.0, 0, 1.0, 0, 0)]).item() == 7


def test_the_noise_is_exponential() -> None:
    noise = exponential_noise(seed=3, draw=5, vocab=200_000).double()
    assert abs(noise.mean() - 1) < 0.01 and abs(noise.var() - 1) < 0.03 and noise.min() > 0
    assert abs((noise < 0.01).double().mean() - 0.00995) < 0.001
    assert not torch.equal(noise, exponential_noise(seed=3, draw=6, vocab=200_000).double())


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(4000, 4)
    tokens = draw(None, logits[:4000], [(1.0, 0, 1.0, 11, number) for number in range(4000)])
    shares = torch.bincount(tokens, minlength=4) / 4000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.025, rtol=0)
