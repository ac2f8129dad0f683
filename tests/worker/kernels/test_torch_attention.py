"""Windows, sinks and latent rows of the torch backend against attention written out."""

from __future__ import annotations

import pytest
import torch
from moonpool_worker.kernels.torch_backend import TorchKernels

from tests.worker.kernels.paged_steps import Step, make_step

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

#: (start, tokens) per chunk: decodes alone and together, short and long; prompts with and without a past; mixtures.
SHAPES = [
    [(0, 1)],
    [(500, 1)],
    [(5, 1), (37, 1), (0, 1)],
    [(5, 1), (37, 1), (500, 1), (399, 1)],
    [(0, 300)],
    [(70, 200)],
    [(128, 256)],
    [(200, 400)],
    [(5, 1), (16, 140), (37, 1), (0, 128)],
]


def attended(step: Step, scale: float, *, sinks: torch.Tensor | None = None, value_dim: int = 0) -> torch.Tensor:
    kernels = TorchKernels()
    plan = kernels.plan(step.chunks, 0, step.group, torch.device("cpu"))
    for cache, rows in zip(step.caches, step.new, strict=True):
        kernels.write_rows(plan, cache, rows)
    if value_dim:
        return kernels.latent_attention(plan, step.q, step.caches[0], value_dim, scale=scale)
    return kernels.attention(plan, step.q, step.caches[0], step.caches[1], scale=scale, sinks=sinks)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window, sunk", [(20, False), (150, False), (150, True), (1, True), (None, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_and_sinks(shape: list[tuple[int, int]], window: int | None, sunk: bool, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-2, 3, 6).to(dtype) if sunk else None
    step = make_step(shape, rows=[(2, 32)] * 2, heads=6, dtype=dtype, scale=0.3, window=window, sinks=sinks)
    result = attended(step, 0.3, sinks=sinks)
    assert result.shape == (step.q.shape[0], 6 * 32)
    expected = step.expected.reshape(result.shape)
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_latent_attention(shape: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = make_step(shape, rows=[(40,)], heads=6, dtype=dtype, scale=0.1, value_dim=32)
    result = attended(step, 0.1, value_dim=32)
    torch.testing.assert_close(result.double(), step.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.bit_equal
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window, sunk", [(None, False), (150, False), (150, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_blocks_lie_changes_no_bit(
    shape: list[tuple[int, int]], window: int | None, sunk: bool, dtype: torch.dtype
) -> None:
    sinks = torch.linspace(-2, 3, 6).to(dtype) if sunk else None
    results = [
        attended(
            make_step(
                shape,
                rows=[(2, 32)] * 2,
                heads=6,
                dtype=dtype,
                scale=0.3,
                window=window,
                scattered=scattered,
                dense=dense,
            ),
            0.3,
            sinks=sinks,
        )
        for scattered, dense in ((False, True), (True, True), (True, False))
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.bit_equal
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_latent_rows_lie_changes_no_bit(shape: list[tuple[int, int]], dtype: torch.dtype) -> None:
    results = [
        attended(
            make_step(shape, rows=[(40,)], heads=6, dtype=dtype, scale=0.1, value_dim=32, scattered=scattered), 0.1,
            value_dim=32,
        )
        for scattered in (False, True)
    ]  # fmt: skip
    assert torch.equal(*results)


def test_a_wider_window_than_the_text_changes_nothing() -> None:
    steps = [
        make_step([(30, 1), (9, 20)], rows=[(2, 32)] * 2, heads=6, dtype=torch.float32, scale=0.3, window=window)
        for window in (None, 1000)
    ]
    torch.testing.assert_close(attended(steps[0], 0.3), attended(steps[1], 0.3), atol=1e-6, rtol=1e-6)


def test_rows_of_several_tokens_are_refused() -> None:
    step = make_step([(0, 8)], rows=[(2, 32)] * 2, heads=6, dtype=torch.float32, scale=0.3)
    with pytest.raises(ValueError, match="rows of 4 tokens"):
        TorchKernels().plan(step.chunks, 0, step.group.model_copy(update={"stride": 4}), torch.device("cpu"))
