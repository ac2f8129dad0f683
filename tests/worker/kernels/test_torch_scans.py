"""The torch recurrences against the recurrences written out, over steps of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from moonpool_worker.engine.batch import SequenceChunk, StateSlots
from moonpool_worker.kernels.torch_scans import TorchScans

from tests.worker.kernels.state_cases import (
    STEPS,
    Chunk,
    Inputs,
    chunks_of,
    gated_delta_inputs,
    mamba2_inputs,
    states_like,
    written_out_conv,
    written_out_gated_delta,
    written_out_mamba2,
)

CPU = torch.device("cpu")
KERNELS = TorchScans()


def conv_inputs(rows: int, width: int = 4, channels: int = 24) -> Inputs:
    torch.manual_seed(rows)
    tensors = {
        "x": torch.randn(rows, channels),
        "weight": torch.randn(channels, width),
        "bias": torch.randn(channels),
    }
    return Inputs(tensors, (channels, width - 1))


#: Inputs for so many rows, the kernel, the recurrence written out; what of the inputs has rows.
RECURRENCES: dict[str, tuple[Callable[[int], Inputs], Callable[..., torch.Tensor], Callable[..., Any], set[str]]] = {
    "conv": (conv_inputs, KERNELS.causal_conv, partial(written_out_conv, silu=True), {"x"}),
    "gdn": (
        partial(gated_delta_inputs, channels=False),
        KERNELS.gated_delta,
        written_out_gated_delta,
        {"q", "k", "v", "g", "beta"},
    ),
    "kda": (
        partial(gated_delta_inputs, channels=True),
        KERNELS.gated_delta,
        written_out_gated_delta,
        {"q", "k", "v", "g", "beta"},
    ),
    "mamba2": (mamba2_inputs, KERNELS.mamba2, written_out_mamba2, {"x", "dt", "b", "c"}),
}


def compute(name: str, step: list[Chunk], tensors: dict[str, torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    kernel = RECURRENCES[name][1]
    return kernel(KERNELS.state_plan(chunks_of(step), 1, CPU), **tensors, states=states)


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
def test_outputs_and_states(name: str, step: list[Chunk]) -> None:
    make, _, written_out, by_row = RECURRENCES[name]
    inputs = make(sum(tokens for _, tokens, _, _ in step))
    states = states_like(*inputs.state)
    before = states.clone()
    out = compute(name, step, inputs.tensors, states)
    expected, row = before.double(), 0
    for start, tokens, source, targets in step:
        state, first = before[source], start
        for position, block in targets:
            rows = slice(row, row + position - first)
            if position > first:
                mine = {n: t[rows] if n in by_row else t for n, t in inputs.tensors.items()}
                y, state = written_out(**mine, state=state)
                torch.testing.assert_close(out[rows].double(), y, atol=5e-5, rtol=5e-5)
            expected[block] = state
            row, first = rows.stop, position
        assert first == start + tokens
    # Blocks that are no target are as they were, the null block among them.
    torch.testing.assert_close(states.double(), expected, atol=2e-5, rtol=2e-5)
    untouched = sorted(set(range(len(states))) - {block for _, _, _, targets in step for _, block in targets})
    assert torch.equal(states[untouched], before[untouched])


def test_conv_without_bias_or_activation() -> None:
    inputs = conv_inputs(40)
    states = states_like(*inputs.state)
    before = states[3].clone()
    plan = KERNELS.state_plan(chunks_of([(9, 40, 3, [(49, 3)])]), 1, CPU)
    out = KERNELS.causal_conv(plan, inputs.tensors["x"], inputs.tensors["weight"], None, states, silu=False)
    expected, after = written_out_conv(inputs.tensors["x"], inputs.tensors["weight"], None, before, silu=False)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[3].double(), after)


@pytest.mark.bit_equal
@pytest.mark.parametrize("name", RECURRENCES)
def test_neighbours_change_no_bit(name: str) -> None:
    """A decode alone and among others, a prompt alone and among others."""
    step = [
        (7, 1, 3, [(8, 3)]),
        (0, 70, 0, [(64, 8), (70, 4)]),
        (9, 1, 5, [(10, 6)]),
        (9, 1, 7, [(10, 7)]),
        (5, 33, 9, [(38, 9)]),
    ]
    make, _, _, by_row = RECURRENCES[name]
    inputs = make(sum(tokens for _, tokens, _, _ in step))
    states = states_like(*inputs.state)
    alone, row = states.clone(), 0
    together = compute(name, step, inputs.tensors, states)
    for chunk in step:
        rows = slice(row, row + chunk[1])
        mine = {n: t[rows].clone() if n in by_row else t for n, t in inputs.tensors.items()}
        assert torch.equal(compute(name, [chunk], mine, alone), together[rows])
        row = rows.stop
    assert torch.equal(alone, states)


@pytest.mark.bit_equal
@pytest.mark.parametrize("name", RECURRENCES)
def test_cut_at_a_checkpoint_changes_no_bit(name: str) -> None:
    """One chunk with a checkpoint on its way, beside two chunks that meet there, beside a hit of the checkpoint."""
    make, _, _, by_row = RECURRENCES[name]
    inputs = make(150)
    whole, cut = states_like(*inputs.state), states_like(*inputs.state)
    out = compute(name, [(0, 150, 0, [(64, 8), (150, 4)])], inputs.tensors, whole)
    first, second = (
        {n: t[rows].clone() if n in by_row else t for n, t in inputs.tensors.items()}
        for rows in (slice(0, 64), slice(64, 150))
    )
    assert torch.equal(compute(name, [(0, 64, 0, [(64, 5)])], first, cut), out[:64])
    assert torch.equal(compute(name, [(64, 86, 5, [(150, 4)])], second, cut), out[64:])
    assert torch.equal(cut[5], whole[8]) and torch.equal(cut[4], whole[4])
    cut[9] = whole[8]
    assert torch.equal(compute(name, [(64, 86, 9, [(150, 6)])], second, cut), out[64:])
    assert torch.equal(cut[6], whole[4])


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_the_hardest_keys(name: str) -> None:
    """The same key again and again, without decay, written in full: the tile's system has its largest solution."""
    rows, heads, dim = 128, 2, 16
    k = torch.nn.functional.normalize(torch.ones(rows, heads, dim), dim=-1)
    v = torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(0))
    tensors = {
        "q": k,
        "k": k,
        "v": v,
        "g": torch.zeros(rows, heads, dim) if name == "kda" else torch.zeros(rows, heads),
        "beta": torch.ones(rows, heads),
    }
    states = states_like(heads, dim, dim)
    out = compute(name, [(0, rows, 0, [(rows, 1)])], tensors, states)
    torch.testing.assert_close(out, v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("targets", "index"), [([], 1), ([(4, 1)], 1), ([(0, 1), (5, 2)], 1), ([(5, 1), (3, 2), (5, 1)], 1), ([(5, 1)], 0)]
)
def test_states_that_do_not_fit_are_refused(targets: list[tuple[int, int]], index: int) -> None:
    chunk = SequenceChunk([0] * 5, 0, ((), ()), states=(None, StateSlots(0, targets)))
    with pytest.raises(ValueError, match="state"):
        KERNELS.state_plan([chunk], index, CPU)
