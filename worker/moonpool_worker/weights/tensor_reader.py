"""Fill matrices from a checkpoint: several stored tensors stacked into one, converted as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.errors import ModelLoadError

#: ``progress(done, total)`` in bytes of the checkpoint.
Progress = Callable[[int, int], None]

#: Stored by some although the configuration says that it is the embedding.
_TIED_HEAD = "lm_head.weight"


class TensorReader:
    """Reads the tensors in ``shapes`` as ``dtype``. Raises ModelLoadError when one is missing or has another shape."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        progress: Progress | None = None,
    ) -> None:
        _check(checkpoint, shapes)
        self.dtype = dtype
        self._checkpoint, self._shapes, self._progress = checkpoint, shapes, progress
        self._total = sum(checkpoint.size(name) for name in shapes)
        self._done = 0
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="weights")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def read(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensors below one another: [sum of rows, width], or the vector itself for a single one.

        ``dtype`` where a tensor needs more precision than the model has.
        """
        shapes = [self._shapes[name] for name in names]
        stacked = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype or self.dtype)
        parts = stacked.split([shape[0] for shape in shapes])
        list(self._pool.map(self._fill, names, parts))
        self._done += sum(self._checkpoint.size(name) for name in names)
        if self._progress:
            self._progress(self._done, self._total)
        return stacked

    @torch.inference_mode()  # which is a property of the thread
    def _fill(self, name: str, target: torch.Tensor) -> None:
        for first, rows in self._checkpoint.rows(name):
            target[first : first + rows.shape[0]].copy_(rows)


def _check(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(shapes.keys() - set(checkpoint.names()))
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} among them")
    # A bias or a RoPE table that the family knows nothing of means another model under a known name.
    surplus = sorted(set(checkpoint.names()) - shapes.keys() - {_TIED_HEAD} - _derived(checkpoint))
    if surplus:
        raise ModelLoadError(
            f"the checkpoint has {len(surplus)} tensors that are not supported, {surplus[0]} among them"
        )
    for name, shape in shapes.items():
        found = checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(f"tensor {name} has shape {found} where the configuration says {shape}")


def _derived(checkpoint: Checkpoint) -> set[str]:
    """What old exports stored although the configuration implies it."""
    return {name for name in checkpoint.names() if name.endswith("rotary_emb.inv_freq")}
