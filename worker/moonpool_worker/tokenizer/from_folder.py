"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` and what stands beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moonpool_worker.tokenizer.tokenizer import Tokenizer as MoonpoolTokenizer
from moonpool_worker.weights.errors import ModelLoadError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def tokenizer_from_folder(folder: Path) -> MoonpoolTokenizer:
    """Raises ModelLoadError when ``tokenizer.json`` is missing or broken."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as fault:  # the library raises bare Exception
        raise ModelLoadError(f"{path} cannot be read: {fault}") from fault
    config = _json(folder / "tokenizer_config.json")
    eos = _ids(_json(folder / "generation_config.json").get("eos_token_id"))
    eos |= _ids(_json(folder / "config.json").get("eos_token_id"))
    named = backend.token_to_id(_content(config.get("eos_token")))
    template = folder / "chat_template.jinja"
    return MoonpoolTokenizer(
        backend,
        eos_ids=eos | ({named} if named is not None else set()),
        bos_id=backend.token_to_id(_content(config.get("bos_token"))),
        add_bos=bool(config.get("add_bos_token", False)),
        chat_template=template.read_text() if template.exists() else config.get("chat_template"),
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as fault:
        raise ModelLoadError(f"{path} is not JSON: {fault}") from fault


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {int(value)}


def _content(token: Any) -> str:
    """A token is written as its text, or as an object that has it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
