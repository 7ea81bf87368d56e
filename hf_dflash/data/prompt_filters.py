# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Which prompts of a mixture are too short, too long, or in another language."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptFilters:
    """
    What a prompt must fulfil; `None` demands nothing.

    Args:
        min_characters (`int`, *optional*):
            Of the user turns together.
        max_characters (`int`, *optional*):
            Of all that the target is shown.
        max_turns (`int`, *optional*):
            User turns.
        languages (`list[str]`, *optional*):
            Of the user turns, as ISO 639-1 codes.
    """

    min_characters: int | None = None
    max_characters: int | None = None
    max_turns: int | None = None
    languages: list[str] | None = None

    def reason_against(self, messages: list[dict]) -> str | None:
        """Why a prompt is removed, or `None`."""
        user_turns = [message["content"] for message in messages if message["role"] == "user"]
        if self.min_characters is not None and sum(map(len, user_turns)) < self.min_characters:
            return "too_short"
        if self.max_characters is not None and sum(len(m["content"]) for m in messages) > self.max_characters:
            return "too_long"
        if self.max_turns is not None and len(user_turns) > self.max_turns:
            return "too_many_turns"
        if self.languages is not None and _language_of("\n".join(user_turns)) not in self.languages:
            return "other_language"
        return None


def _language_of(text: str) -> str:
    try:
        import py3langid
    except ImportError:
        raise ImportError("Filtering by language needs the package py3langid: pip install 'hf-dflash[data]'") from None
    return py3langid.classify(text[:2000])[0]
