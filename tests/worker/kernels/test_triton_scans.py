"""The Triton recurrences in the interpreter, against torch's."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch
from moonpool_worker.kernels.torch_scans import TorchScans
from moonpool_worker.kernels.triton import scan_gated_delta, scan_mamba2
from moonpool_worker.kernels.triton.scans_backend import TritonScans

from tests.worker.kernels.state_cases import (
    STEPS,
    Chunk,
    Inputs,
    chunks_of,
    gated_delta_inputs,
    mamba2_inputs,
    states_like,
)

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3}


def conv_inputs(rows: int, dtype: torch.dtype = torch.float32, width: int = 4, channels: int = 72) -> Inputs:
    torch.manual_seed(rows)
    # As a model has it: the channels are a part of a wider row.
    x = torch.randn(rows, channels + 8).to(dtype)[:, :channels]
    tensors = {"x": x, "weight": torch.randn(channels, width).to(dtype), "bias": torch.randn(channels).to(dtype)}
    return Inputs(tensors, (channels, width - 1))


RECURRENCES = {
    "causal_conv": conv_inputs,
    "gated_delta": partial(gated_delta_inputs, channels=False, heads=2, dk=16, dv=24),
    "gated_delta by channel": partial(gated_delta_inputs, channels=True, heads=2, dk=24, dv=16),
    "mamba2": partial(mamba2_inputs, heads=2, groups=1, dv=16, n=24),
}
#: Half precision shows nothing about steps that float32 does not show.
CASES = [*((step, torch.float32) for step in STEPS), ("everything at once", torch.float16)]


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize(("step", "dtype"), CASES, ids=str)
def test_as_torch(name: str, step: str, dtype: torch.dtype) -> None:
    chunks: list[Chunk] = STEPS[step]
    rows = sum(tokens for _, tokens, _, _ in chunks)
    inputs = RECURRENCES[name](rows, dtype=dtype)
    states = states_like(*inputs.state, dtype=dtype if name == "causal_conv" else torch.float32)
    found_states, results = states.clone(), {}
    for kernels, mine in ((TorchScans(), states), (TritonScans(), found_states)):
        plan = kernels.state_plan(chunks_of(chunks), 1, CPU)
        results[type(kernels)] = getattr(kernels, name.split()[0])(plan, **inputs.tensors, states=mine)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(results[TritonScans], results[TorchScans], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found_states, states, atol=tolerance, rtol=tolerance)
    assert not found_states[0].any()


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("gated_delta", scan_gated_delta),
        ("gated_delta by channel", scan_gated_delta),
        ("mamba2", scan_mamba2),
    ],
)
@pytest.mark.parametrize("step", ["short prompt", "checkpoints on the way"])
def test_tiles_in_float32(name: str, module: ModuleType, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does in half precision only: here its mathematics without the rounding."""
    monkeypatch.setattr(module, "by_token", module.by_tile)
    test_as_torch(name, step, torch.float32)


def test_conv_of_two_taps_without_bias_or_activation() -> None:
    """The window is a single input: the smallest there is."""
    inputs = conv_inputs(94, width=2)
    chunks = chunks_of(STEPS["everything at once"])
    states = states_like(*inputs.state)
    found_states = states.clone()
    x, weight = inputs.tensors["x"], inputs.tensors["weight"]
    torch_kernels, triton_kernels = TorchScans(), TritonScans()
    expected = torch_kernels.causal_conv(torch_kernels.state_plan(chunks, 1, CPU), x, weight, None, states, silu=False)
    found = triton_kernels.causal_conv(
        triton_kernels.state_plan(chunks, 1, CPU), x, weight, None, found_states, silu=False
    )
    torch.testing.assert_close(found, expected)
    assert torch.equal(found_states, states)
