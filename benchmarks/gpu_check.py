"""Do the Triton kernels compute what torch does, and how near do they come to what this GPU can do?

    uv run python -m benchmarks.gpu_check [--only decode_gqa,...]     on a machine with a GPU, under 4 minutes
    uv run python -m benchmarks.gpu_check --interpret                 anywhere: tiny sizes, no figures of speed

A table goes to stderr, one flat JSON line to stdout. ``<kernel>_ok``: its results agree with the torch backend's, which
computes in float32 on the CPU. ``<kernel>_share``: the least time that the GPU needs for the kernel's bytes or its
operations, whichever takes longer, over the time that it took; the GPU's rates are its own copy's and its own matrix
product's, measured first (``copy_gb_s``, ``matmul_tflop_s``). A kernel that fails has ``<kernel>_why``.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch

from benchmarks.harness.report import Report, say

#: The largest difference over the largest value; bfloat16 has 8 bits.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
#: Ids that chance decides may fall to the other side when a logarithm is rounded differently.
SAME_IDS = 0.98
#: Figures of a block copy: of 2 blocks in 3, in any order.
COPIES = ("block_copy_to_host", "block_copy_to_device")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--interpret", action="store_true", help="in Triton's interpreter, on the CPU, at tiny sizes")
    parser.add_argument("--only", default="", help="names of kernels, with commas between them")
    wanted = parser.parse_args()
    if wanted.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    # Triton reads the variable when it is first imported.
    from benchmarks.harness.gpu_cases import CASES

    names = [name for name in (*CASES, *COPIES) if not wanted.only or name in wanted.only.split(",")]
    report = Report("gpu_check")
    if not wanted.interpret and not torch.cuda.is_available():
        report.add(why="no GPU here; --interpret runs the checks without one")
        for name in names:
            report.add(**{f"{name}_ok": None, f"{name}_share": None})
    else:
        _check_all(report, names, wanted.interpret)
    print(report.line())


def _check_all(report: Report, names: list[str], interpret: bool) -> None:
    from benchmarks.harness import gpu_limits

    limits = None
    if not interpret:
        limits = gpu_limits.measure()
        report.add(device=torch.cuda.get_device_name(), copy_gb_s=limits.memory / 1e9)
        report.add(matmul_tflop_s=limits.products / 1e12)
        report.add(to_host_gb_s=limits.to_host / 1e9, to_device_gb_s=limits.to_device / 1e9)
        say(report.line())
    for name in names:
        begin = time.monotonic()
        try:
            ok, share, text = (_check_copy if name in COPIES else _check)(name, limits)
        except Exception as failure:
            # One broken kernel must not hide what the others do.
            report.add(**{f"{name}_ok": False, f"{name}_share": None, f"{name}_why": f"{failure!r:.300}"})
            say(f"{name:24} FAILED {failure!r:.2000}")
            continue
        report.add(**{f"{name}_ok": ok, f"{name}_share": share})
        say(f"{name:24} {'ok   ' if ok else 'WRONG'} {text} ({time.monotonic() - begin:.1f} s)")


def _check(name: str, limits: Any) -> tuple[bool, float | None, str]:
    """Whether it is right, its share of what the device can do, and a line of text."""
    from moonpool_worker.kernels.torch_backend import TorchKernels
    from moonpool_worker.kernels.torch_sampling import sample
    from moonpool_worker.kernels.triton.backend import TritonKernels

    from benchmarks.harness import gpu_limits
    from benchmarks.harness.gpu_cases import CASES, CPU, Maker

    torch.manual_seed(0)
    device = torch.device("cpu" if limits is None else "cuda")
    # The interpreter's products of bfloat16 are wrong.
    make = Maker(device, torch.float16 if limits is None else torch.bfloat16)
    triton_kernels, torch_kernels = TritonKernels(), TorchKernels()
    torch_kernels.sample = sample  # type: ignore[attr-defined]

    case = CASES[name](make, "tiny" if limits is None else "small")
    # Copies: some of them are written to.
    wide = {n: t.clone().cpu() for n, t in case.tensors.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in wide.items()}
    expected = _listed(case.run(torch_kernels, case.plan(torch_kernels, CPU), wide))
    found = _listed(case.run(triton_kernels, case.plan(triton_kernels, device), case.tensors))
    errors = [_error(a.cpu(), b, case.exact) for a, b in zip(found, expected, strict=True)]
    ok = max(errors) <= (1 - SAME_IDS if case.exact else TOLERANCE[make.dtype])
    text = f"error {max(errors):.1e}"
    if limits is None:
        return ok, None, text

    case = CASES[name](make, "full")
    plan = case.plan(triton_kernels, device)
    taken = gpu_limits.seconds(lambda: case.run(triton_kernels, plan, case.tensors))
    share = limits.least_seconds(case.moved, case.operations) / taken
    rates = (
        f"{taken * 1e6:9.1f} us, {case.moved / taken / 1e9:7.1f} GB/s, {case.operations / taken / 1e12:6.1f} TFLOP/s"
    )
    return ok, share, f"{text}, {rates}, {100 * share:5.1f} % of the limit"


def _listed(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _error(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    """The share of results that differ, or the largest difference over the largest value; infinite for NaN."""
    if exact:
        return float((found.to(expected.dtype) != expected).double().mean())
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    return error if error == error else float("inf")


def _check_copy(name: str, limits: Any) -> tuple[bool, float | None, str]:
    from moonpool_api.geometry import full_attention
    from moonpool_worker.cache.device_arena import DeviceArena
    from moonpool_worker.kernels.triton.block_copy import BlockCopy, Move, map_host, unmap_host

    from benchmarks.harness import gpu_limits

    on_gpu = limits is not None
    layers, kv_heads, dim, parents = (32, 8, 128, 1000) if on_gpu else (2, 1, 16, 6)
    geometry = full_attention(layers=layers, kv_heads=kv_heads, head_dim=dim, dtype="float16", prefix_granularity=16)
    arena = DeviceArena(geometry, parents, "cuda" if on_gpu else "cpu")
    size = arena.plan.groups[0].payload_bytes
    blocks = [block for block in range(parents - 1, 0, -1) if block % 3]
    moves = [Move(0, block, place * size) for place, block in enumerate(blocks)]
    host = torch.zeros(len(blocks) * size, dtype=torch.uint8)
    fields = arena.fields(0)
    fields.random_(0, 256)
    wanted = fields[:, blocks].transpose(0, 1).reshape(-1).cpu()
    if on_gpu:
        map_host(host)
    try:
        copy = BlockCopy(arena, host, [1], *() if on_gpu else (3,))
        copy.store(moves).synchronize()
        ok = torch.equal(host, wanted)
        fields.zero_()
        loading = copy.load(moves)
        copy.wait(loading, layers - 1)
        ok = ok and torch.equal(fields[:, blocks].transpose(0, 1).reshape(-1).cpu(), wanted)
        ok = ok and not fields[:, [block for block in range(parents) if block not in set(blocks)]].any()
        if not on_gpu:
            return ok, None, "bytes compared"
        if name == COPIES[0]:
            work, limit = copy.store, limits.to_host
        else:
            work, limit = copy.load, limits.to_device
        # The copies run on streams of their own: the caller's waits for each.
        taken = gpu_limits.seconds(lambda: torch.cuda.current_stream().wait_event(work(moves).event))
        rate = host.numel() / taken
        return ok, rate / limit, f"{rate / 1e9:.1f} GB/s, {100 * rate / limit:.1f} % of the link's own copy"
    finally:
        if on_gpu:
            torch.cuda.synchronize()
            unmap_host(host)


if __name__ == "__main__":
    main()
