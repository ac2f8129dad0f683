"""Answers in OpenAI's shapes, whole and in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moonpool_worker.sampling.sampler import SampledToken
from moonpool_worker.server.generation import Choice, Generation

#: Text of one token, special ones too.
TokenText = Callable[[int], str]


class Format(Protocol):
    """How one of the two calls words its answers. ``first`` is what a stream says before any text, or None."""

    def head(self, call: Generation, chunk: bool) -> dict[str, Any]: ...

    def first(self, index: int) -> dict[str, Any] | None: ...

    def piece(self, choice: Choice, text: str, tokens: list[SampledToken], finish: str | None) -> dict[str, Any]: ...

    def choice(self, choice: Choice) -> dict[str, Any]: ...


class CompletionFormat:
    """``offsets``: where the next token of each choice begins in its text."""

    def __init__(self, model: str, fingerprint: str, token_text: TokenText) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._token_text = token_text
        self._offsets: dict[int, int] = {}

    def head(self, call: Generation, chunk: bool) -> dict[str, Any]:
        return {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(self, choice: Choice, text: str, tokens: list[SampledToken], finish: str | None) -> dict[str, Any]:
        return {
            "index": choice.request.index,
            "text": text,
            "logprobs": self._logprobs(choice, tokens),
            "finish_reason": finish,
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self.piece(choice, choice.text, choice.tokens, choice.finish_reason)

    def _logprobs(self, choice: Choice, tokens: list[SampledToken]) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        texts = [self._token_text(token.token_id) for token in tokens]
        index = choice.request.index
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        tops = []
        for text, token in zip(texts, tokens, strict=True):
            # The chosen token is always there, so there may be one more than was asked for.
            top: dict[str, float | None] = {
                self._token_text(token_id): logprob for token_id, logprob in token.top_logprobs
            }
            tops.append(top | {text: token.logprob})
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": texts,
            "top_logprobs": tops,
        }


class ChatFormat:
    def __init__(self, model: str, fingerprint: str, token_text: TokenText) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._token_text = token_text

    def head(self, call: Generation, chunk: bool) -> dict[str, Any]:
        return {
            "id": call.id,
            "object": "chat.completion.chunk" if chunk else "chat.completion",
            "created": call.created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, text: str, tokens: list[SampledToken], finish: str | None) -> dict[str, Any]:
        return {
            "index": choice.request.index,
            "delta": {"content": text} if text else {},
            "logprobs": self._logprobs(choice, tokens),
            "finish_reason": finish,
        }

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.request.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice, choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, tokens: list[SampledToken]) -> dict[str, Any] | None:
        if choice.request.sampling.logprobs is None:
            return None
        content = [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in token.top_logprobs]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
