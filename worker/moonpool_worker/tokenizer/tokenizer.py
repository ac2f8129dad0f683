"""The tokenizer that the server uses, whatever file it came from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from moonpool_worker.tokenizer.chat_template import ChatTemplate, ChatTemplateError


class Tokenizer:
    """``eos_ids`` end an answer; ``chat_template`` is None for a model without one."""

    def __init__(
        self,
        backend: Backend,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.eos_ids = frozenset(eos_ids)
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        bos_text = backend.id_to_token(bos_id) if bos_id is not None else ""
        eos_text = backend.id_to_token(min(self.eos_ids)) if self.eos_ids else ""
        self.template_text = chat_template
        self._template = ChatTemplate(chat_template, bos_text or "", eos_text or "") if chat_template else None

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt; special tokens written in the text are recognised."""
        return self._bos + self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens too; an incomplete character shows as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def stream_decoder(self) -> StreamDecoder:
        return StreamDecoder(self.backend)

    def apply_chat_template(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """The chat as the text that :meth:`encode` takes. Raises ChatTemplateError with the template's own words."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return self._template.render(messages, add_generation_prompt)


class StreamDecoder:
    """Tokens to text, one at a time; a character is given out only when all its bytes are there."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        #: The tokens behind the last text that was given out, and those since, whose text is held back.
        self._shown: list[int] = []
        self._held: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that became complete with this token, often "" within a character."""
        self._held.append(token_id)
        text = self._stream.step(self._backend, token_id) or ""
        if text:
            self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The text has ended: what was held back, with U+FFFD for a character that will never be complete."""
        if not self._held:
            return ""
        shown = self._backend.decode(self._shown, skip_special_tokens=True)
        whole = self._backend.decode(self._shown + self._held, skip_special_tokens=True)
        self._shown, self._held = [], []
        return whole[len(shown) :]
