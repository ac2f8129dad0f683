"""The torch backend against attention written out, over block tables of every kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from moonpool_api.geometry import full_attention
from moonpool_worker.engine.batch import SequenceChunk
from moonpool_worker.kernels.interface import BackendError, select_backend
from moonpool_worker.kernels.packed_linear import PackedLinear, can_pack
from moonpool_worker.kernels.threads import usable_cpus
from moonpool_worker.kernels.torch_backend import TorchKernels

PAGE, HEADS, KV_HEADS, DIM, BLOCKS = 4, 6, 2, 32, 400
GROUP = full_attention(layers=1, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", prefix_granularity=PAGE).groups[0]


def written_out(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64; the last row of ``q`` [rows, H, D] sees all of ``keys`` [end, K, D]."""
    rows, end = q.shape[0], keys.shape[0]
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,ehd->hre", q.double(), keys) * DIM**-0.5
    scores.masked_fill_(torch.ones(rows, end, dtype=torch.bool).triu_(end - rows + 1), float("-inf"))
    return torch.einsum("hre,ehd->rhd", scores.softmax(-1), values).reshape(rows, HEADS * DIM)


#: (start, rows) per chunk: decodes alone and together, short and long; prompts with and without a past; mixtures.
STEPS = [
    [(0, 1)],
    [(37, 1)],
    [(500, 1)],
    [(5, 1), (37, 1), (0, 1)],
    [(5, 1), (37, 1), (500, 1), (9, 1)],
    [(0, 7)],
    [(0, 300)],
    [(70, 200)],
    [(128, 256)],
    [(130, 20), (0, 5)],
    [(5, 1), (16, 140), (37, 1), (0, 128)],
]


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_attention(step: list[tuple[int, int]], dtype: torch.dtype, scattered: bool) -> None:
    torch.manual_seed(0)
    kernels = TorchKernels()
    # What was never written may hold anything, NaN too, and must not be seen.
    keys, values = (torch.full((BLOCKS, PAGE, KV_HEADS, DIM), float("nan"), dtype=dtype) for _ in range(2))
    free = list(range(1, BLOCKS))
    if scattered:
        random.Random(1).shuffle(free)
    chunks, expected = [], []
    rows = sum(count for _, count in step)
    q, k, v = (torch.randn(rows, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    row = 0
    for start, count in step:
        table = [free.pop(0) for _ in range(-(-(start + count) // PAGE))]
        past = torch.arange(start)
        slots = torch.tensor(table)[past // PAGE] * PAGE + past % PAGE
        past_k, past_v = (torch.randn(start, KV_HEADS, DIM).to(dtype) for _ in range(2))
        keys.view(-1, KV_HEADS, DIM)[slots] = past_k
        values.view(-1, KV_HEADS, DIM)[slots] = past_v
        mine = slice(row, row + count)
        expected.append(written_out(q[mine], torch.cat([past_k, k[mine]]), torch.cat([past_v, v[mine]])))
        chunks.append(SequenceChunk([0] * count, start, (table,)))
        row += count
    plan = kernels.plan(chunks, 0, GROUP, torch.device("cpu"))
    kernels.write_rows(plan, keys, k)
    kernels.write_rows(plan, values, v)
    attended = kernels.attention(plan, q, keys, values)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert attended.shape == (rows, HEADS * DIM)
    torch.testing.assert_close(attended.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels, tolerance = TorchKernels(), 1e-5 if dtype == torch.float32 else 4e-2
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(64).to(dtype)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), normed, atol=tolerance, rtol=tolerance)
    gate, up = wide.chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(kernels.silu_mul(x).double(), expected, atol=tolerance, rtol=tolerance)
    heads, angle = torch.randn(5, 3, 8).to(dtype), torch.rand(5, 1, 4)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    first, second = heads.double().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    torch.testing.assert_close(kernels.rope(heads, cos, sin).double(), turned, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_multiplies_like_a_plain_one(dtype: torch.dtype, rows: int) -> None:
    weight, x = torch.randn(96, 64).to(dtype), torch.randn(rows, 64).to(dtype)
    if not can_pack(weight):
        pytest.skip("this CPU's oneDNN does not pack this dtype")
    expected = x.double() @ weight.double().t()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-1
    torch.testing.assert_close(PackedLinear(weight)(x).double(), expected, atol=tolerance, rtol=tolerance)


def test_backends_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert select_backend("auto").name in ("cpu", "torch")
    with pytest.raises(BackendError, match="needs a GPU"):
        select_backend("triton")
    with pytest.raises(BackendError, match="flash"):
        select_backend("flash")


def test_the_interpreter_stands_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select_backend("triton").name == "triton"
    assert select_backend("auto").name in ("cpu", "torch")


def test_auto_takes_triton_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = select_backend("auto")
    assert (chosen.name, chosen.device.type) == ("triton", "cuda")


def test_threads_follow_the_cpu_quota(tmp_path: Path) -> None:
    every = usable_cpus(tmp_path)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cpus(tmp_path) == every
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cpus(tmp_path) == 1
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(tmp_path) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cpus(tmp_path) == every
