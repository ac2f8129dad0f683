"""Fill matrices from a checkpoint: several stored tensors stacked into one, converted as they are read.

A backend that multiplies quantised blocks gets those as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from moonpool_worker.weights.checkpoint import Checkpoint
from moonpool_worker.weights.errors import ModelLoadError
from moonpool_worker.weights.quantised import QuantisedMatrix

#: ``progress(done, total)`` in bytes of the checkpoint.
Progress = Callable[[int, int], None]

#: Stored by some although the configuration says that it is the embedding.
_TIED_HEAD = "lm_head.weight"


class TensorReader:
    """Reads the tensors in ``shapes`` as ``dtype``. Raises ModelLoadError when one is missing or has another shape.

    ``formats``: GGUF's block formats that ``quantised`` and ``matrix`` leave as they are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        progress: Progress | None = None,
        formats: Collection[str] = (),
        device: torch.device | str = "cpu",
        unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        _check(checkpoint, shapes, unused)
        self.dtype, self.device = dtype, torch.device(device)
        self._formats = formats
        self._checkpoint, self._shapes, self._progress = checkpoint, shapes, progress
        self._total = sum(checkpoint.size(name) for name in shapes)
        self._done: set[str] = set()
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
        size = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        stacked = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        parts = stacked.split([shape[0] for shape in shapes])
        list(self._pool.map(self._fill, names, parts))
        self._count(names)
        return stacked

    def quantised(self, *names: str) -> QuantisedMatrix | None:
        """As :meth:`read`, in the blocks of the file; None unless all tensors have the same one of the backend's
        formats."""
        found = [self._checkpoint.blocks(name) for name in names] if self._formats else [None]
        kinds = {blocks[0] if blocks else "" for blocks in found}
        if len(kinds) != 1 or not kinds <= set(self._formats):
            return None
        self._count(names)
        rows, width = sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]
        return QuantisedMatrix(kinds.pop(), tuple(blocks[1] for blocks in found if blocks), (rows, width))

    def matrix(self, *names: str) -> torch.Tensor | QuantisedMatrix:
        """For what goes into ``Kernels.linear``: blocks of the file where that is possible, else numbers."""
        return self.quantised(*names) or self.read(*names)

    def _count(self, names: tuple[str, ...]) -> None:
        self._done |= set(names)
        if self._progress:
            self._progress(sum(self._checkpoint.size(name) for name in self._done), self._total)

    @torch.inference_mode()  # which is a property of the thread
    def _fill(self, name: str, target: torch.Tensor) -> None:
        for first, rows in self._checkpoint.rows(name):
            target[first : first + rows.shape[0]].copy_(rows)


def _check(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], unused: Callable[[str], bool]) -> None:
    missing = sorted(shapes.keys() - set(checkpoint.names()))
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} among them")
    # A bias or a RoPE table that the family knows nothing of means another model under a known name.
    known = shapes.keys() | {_TIED_HEAD} | _derived(checkpoint)
    surplus = sorted(name for name in checkpoint.names() if name not in known and not unused(name))
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
