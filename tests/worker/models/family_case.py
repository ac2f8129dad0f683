"""A tiny random model of a family, ours and transformers' side by side, and the checks that every family passes.

A family's tests are a subclass; pytest runs the inherited tests for each::

    class TestQwen3(FamilyChecks):
        config = Qwen3Config(hidden_size=32, …)

The reference is written as a Hugging Face folder by transformers and loaded by our loader. Block tables and states are
made by hand (:class:`Text`), with blocks that are not neighbours, so that no scheduler or cache is needed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from moonpool_api.geometry import CacheGeometry
from moonpool_worker.cache.device_arena import NULL_BLOCK, DeviceArena
from moonpool_worker.engine.batch import SequenceChunk, StateSlots, StepBatch
from moonpool_worker.kernels.interface import select_backend
from moonpool_worker.models.dtype import dtype_name
from moonpool_worker.models.family import Model
from moonpool_worker.models.registry import geometry, load_model
from moonpool_worker.models.runner import ModelRunner
from moonpool_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from transformers import AutoModelForCausalLM, PretrainedConfig

#: Tokens per page.
PAGE = 16
PARENTS = 512
#: Largest difference of a logit in float32; the logits themselves are about 1.
TOLERANCE = 1e-4


def reference_model(config: PretrainedConfig) -> Any:
    """transformers' model with weights that matter: no norm is 1, no bias 0 (nor that of a router's choice, a
    buffer), logits are about 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
            if name.endswith("tid2eid"):
                count = config.n_routed_experts
                buffer.copy_(torch.rand(buffer.shape[0], count).argsort(-1)[:, : buffer.shape[1]])
    return model


def _used_arena(shape: CacheGeometry) -> DeviceArena:
    """An arena that others used before: NaN everywhere but in the null blocks."""
    arena = DeviceArena(shape, PARENTS)
    arena.bytes.fill_(0xFF)
    for index, group in enumerate(shape.groups):
        for layer, plane in itertools.product(group.layers, group.planes):
            arena.view(index, layer, plane.name)[NULL_BLOCK] = 0
    return arena


class Case:
    """A model of ours over an arena of its own, whose blocks are handed out in no order."""

    def __init__(self, model: Model, page: int = PAGE) -> None:
        self.page, self.config = page, model.config
        dtype = dtype_name(model.dtype)
        self.geometry = geometry(self.config, dtype, page)
        self.runner = ModelRunner(model, _used_arena(self.geometry))
        self._parents = list(range(1, PARENTS))
        random.Random(0).shuffle(self._parents)
        self._free: list[list[int]] = [[] for _ in self.geometry.groups]

    def take(self, group: int) -> int:
        """A block of a group that nothing else uses."""
        free = self._free[group]
        if not free:
            arena = self.runner.arena
            free.extend(arena.plan.blocks_of(group, self._parents.pop(), arena.parents))
        return free.pop()

    def step(self, *chunks: SequenceChunk) -> torch.Tensor:
        """Logits [chunks that want them, vocab] of one step."""
        return self.runner.forward(StepBatch(list(chunks)))


class FamilyCase(Case):
    """``reference`` and our model (``runner``) with the same weights, in float32; ``folder`` holds the checkpoint."""

    def __init__(self, config: PretrainedConfig, folder: Path, page: int = PAGE) -> None:
        self.reference = reference_model(config)
        self.reference.save_pretrained(folder)
        checkpoint = SafetensorsCheckpoint(folder)
        try:
            super().__init__(load_model(checkpoint, "float32", select_backend("torch")), page)
        finally:
            checkpoint.close()

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """Random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(self.config.vocab) for _ in range(count)]

    @torch.no_grad()
    def expected(self, ids: Sequence[int]) -> torch.Tensor:
        """The reference's logits [len(ids), vocab], from one pass over the whole text."""
        return self.reference(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    @torch.no_grad()
    def expected_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.expected(ids)[-1].argmax()))
        return ids[len(prompt) :]


class Text:
    """One request by hand. ``length`` tokens are computed; ``tables[g]`` and ``states[g]`` say where, ``checkpoints``
    holds the state blocks at page boundaries by (group, position)."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.length = 0
        self.tables: list[list[int]] = [[] for _ in case.geometry.groups]
        self.states = [0] * len(case.geometry.groups)
        self.checkpoints: dict[tuple[int, int], int] = {}

    def chunk(self, ids: Sequence[int], *, keep: Sequence[int] = (), wants_logits: bool = True) -> SequenceChunk:
        """The next tokens as a chunk of a step, which must then run. States after ``keep`` tokens become checkpoints;
        those at its end are one when they are at a page boundary."""
        start, end = self.length, self.length + len(ids)
        slots: list[StateSlots | None] = []
        for index, group in enumerate(self.case.geometry.groups):
            if group.family == "state":
                slots.append(self._state(index, end, keep))
                continue
            slots.append(None)
            table = self.tables[index]
            table.extend(self.case.take(index) for _ in range(-(-end // group.block_tokens) - len(table)))
            if group.window is not None:
                passed = max(0, (start - group.window + 1) // group.block_tokens)
                table[:passed] = [0] * passed
        self.length = end
        tables = tuple(tuple(table) for table in self.tables)
        return SequenceChunk(list(ids), start, tables, wants_logits, tuple(slots))

    def _state(self, index: int, end: int, keep: Sequence[int]) -> StateSlots:
        source = self.states[index]
        targets = [(position, self.case.take(index)) for position in keep]
        self.checkpoints |= {(index, position): block for position, block in targets}
        if source == 0 or source in self.checkpoints.values():
            self.states[index] = self.case.take(index)
        if end % self.case.page == 0 and end not in keep:
            self.checkpoints[index, end] = self.case.take(index)
            targets.append((end, self.checkpoints[index, end]))
        return StateSlots(source, [*targets, (end, self.states[index])])

    def feed(self, ids: Sequence[int], *, keep: Sequence[int] = ()) -> torch.Tensor:
        """Compute the next tokens in a step of their own; the last one's logits [vocab]."""
        return self.case.step(self.chunk(ids, keep=keep))[0]

    def lose_the_past(self) -> None:
        """What windows have passed is gone: other requests wrote NaN to those blocks."""
        arena = self.case.runner.arena
        for index, group in enumerate(self.case.geometry.groups):
            if group.window is None:
                continue
            passed = max(0, (self.length - group.window + 1) // group.block_tokens)
            for layer, plane in itertools.product(group.layers, group.planes):
                arena.view(index, layer, plane.name)[[block for block in self.tables[index][:passed] if block]] = nan
            self.tables[index][:passed] = [0] * passed

    def hit(self, position: int) -> Text:
        """Another request whose first ``position`` tokens (whole pages) are this one's, from the cache."""
        other = Text(self.case)
        other.length = position
        for index, group in enumerate(self.case.geometry.groups):
            if group.family == "state":
                other.states[index] = self.checkpoints[index, position]
                other.checkpoints[index, position] = other.states[index]
            else:
                other.tables[index] = self.tables[index][: position // group.block_tokens]
        return other


class FamilyChecks:
    """What every family passes; a subclass gives ``config``, and ``page`` where 16 tokens do not suit it."""

    config: ClassVar[PretrainedConfig]
    page: ClassVar[int] = PAGE

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCase]:
        case = FamilyCase(cls.config, tmp_path_factory.mktemp(cls.__name__.lower()), cls.page)
        # Threads only wait for one another over matrices as small as these.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield case
        torch.set_num_threads(threads)

    @pytest.mark.family
    @pytest.mark.parametrize("sizes", [[75], [16, 32, 27], [1, 40, 2, 32], [30, 45]], ids=str)
    def test_prefill(self, case: FamilyCase, sizes: list[int]) -> None:
        """In one chunk and in several, beside the reference's one pass."""
        ids = case.ids(sum(sizes))
        expected, text = case.expected(ids), Text(case)
        assert expected.std() > 0.1, "logits so small show nothing"
        for size in sizes:
            logits = text.feed(ids[text.length : text.length + size])
            torch.testing.assert_close(logits, expected[text.length - 1], atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_decode(self, case: FamilyCase) -> None:
        """Token by token behind a prompt, over two page boundaries."""
        ids = case.ids(60, seed=1)
        expected, text = case.expected(ids), Text(case)
        text.feed(ids[:21])
        for token in ids[21:]:
            logits = text.feed([token])
            torch.testing.assert_close(logits, expected[text.length - 1], atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_mixed_step(self, case: FamilyCase) -> None:
        """Decodes, a prompt's middle and a whole prompt in one step, each as if it were alone."""
        texts = [case.ids(count, seed=count) for count in (18, 35, 50, 9, 40)]
        requests = [Text(case) for _ in texts]
        for request, ids, past in zip(requests, texts, (17, 34, 20, 0, 39), strict=True):
            if past:
                request.feed(ids[:past])
        logits = case.step(*(r.chunk(ids[r.length :]) for r, ids in zip(requests, texts, strict=True)))
        expected = torch.stack([case.expected(ids)[-1] for ids in texts])
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_greedy(self, case: FamilyCase) -> None:
        prompt, count = case.ids(37, seed=3), 12
        text = Text(case)
        ids = [int(text.feed(prompt).argmax())]
        while len(ids) < count:
            ids.append(int(text.feed(ids[-1:]).argmax()))
        assert ids == case.expected_greedy(prompt, count)

    @pytest.mark.family
    @pytest.mark.bit_equal
    @pytest.mark.parametrize("pages", [1, 3])
    def test_hit(self, case: FamilyCase, pages: int) -> None:
        """A prompt behind a cached prefix has the bits of the run that cached it, and so have the tokens after it;
        others wrote to the cache in between."""
        ids, cut = case.ids(70, seed=4), pages * case.page
        cold = Text(case)
        cold.feed(ids[:cut])
        cold.lose_the_past()
        hit = cold.hit(cut)
        expected = [cold.feed(ids[cut:60])] + [cold.feed([token]) for token in ids[60:]]
        Text(case).feed(case.ids(70, seed=5))
        found = [hit.feed(ids[cut:60])] + [hit.feed([token]) for token in ids[60:]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        torch.testing.assert_close(found[0], case.expected(ids)[59], atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_checkpoints_on_the_way(self, case: FamilyCase) -> None:
        """A hit of a page in the middle of a chunk, and the same text going on, are what the reference says."""
        ids, kept = case.ids(66, seed=6), 2 * case.page
        cold = Text(case)
        cold.feed(ids[:55], keep=[kept])
        expected = case.expected(ids)
        hit = cold.hit(kept)
        for text, upto in ((hit, 60), (cold, 60), (hit, 66)):
            logits = text.feed(ids[text.length : upto])
            torch.testing.assert_close(logits, expected[upto - 1], atol=TOLERANCE, rtol=0)
