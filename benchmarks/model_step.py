"""How fast is the model alone, without scheduler and server?

A cold prompt of 2,000 tokens in chunks of 512, then decodes of 1 and 8 sequences at 50 and at 2,000 positions.
Medians; SmolLM2 in the default data type: ``uv run python -m benchmarks.model_step``.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

# Waiting threads give way soon: on a shared machine spinning ones stop each other. Read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from moonpool_worker.cache.device_arena import DeviceArena
from moonpool_worker.engine.batch import SequenceChunk, StepBatch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.dtype import dtype_name
from moonpool_worker.models.registry import geometry, load_model
from moonpool_worker.models.runner import ModelRunner
from moonpool_worker.weights.open import open_checkpoint

from benchmarks.harness.report import Report

PAGE, PROMPT, CHUNK, SEQUENCES = 16, 2000, 512, 8
PAGES = 140


def tables() -> list[list[int]]:
    return [list(range(1 + PAGES * i, 1 + PAGES * (i + 1))) for i in range(SEQUENCES)]


def prefill(runner: ModelRunner) -> None:
    ids = [100 + (i * 7919) % 40_000 for i in range(PROMPT)]
    for start in range(0, PROMPT, CHUNK):
        part = ids[start : start + CHUNK]
        runner.forward(StepBatch([SequenceChunk(part, start, (tables()[0],), start + len(part) == PROMPT)]))


def decode(runner: ModelRunner, sequences: int, position: int) -> None:
    chunks = [SequenceChunk([position], position, (table,)) for table in tables()[:sequences]]
    runner.forward(StepBatch(chunks)).argmax(-1).tolist()


def median_seconds(work: Callable[[int], None], repeats: int) -> float:
    seconds = []
    for index in range(repeats):
        begin = time.perf_counter()
        work(index)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    report = Report("model_step")
    begin = time.perf_counter()
    checkpoint = open_checkpoint("smollm2")
    model = load_model(checkpoint, "auto", select_backend("auto"))
    checkpoint.close()
    report.add(dtype=dtype_name(model.dtype), load_seconds=time.perf_counter() - begin, load_average=os.getloadavg()[0])
    arena = DeviceArena(geometry(checkpoint.config, dtype_name(model.dtype), PAGE), PAGES * SEQUENCES + 1)
    runner = ModelRunner(model, arena)
    prefill(runner)
    report.add(prefill_tokens_per_s=PROMPT / median_seconds(lambda _: prefill(runner), 5))
    for sequences in (1, SEQUENCES):
        for position, name in ((50, ""), (2000, "_at_2000")):
            seconds = median_seconds(lambda i, n=sequences, p=position: decode(runner, n, p + i), 30)  # type: ignore[misc]
            report.add(**{f"decode_{sequences}{name}_tokens_per_s": sequences / seconds})
    print(report.line())


if __name__ == "__main__":
    main()
