# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The prompts that the target is asked: read, checked, and without those that have an answer already."""

import itertools
from collections.abc import Iterator

from hf_dflash.object_store import is_object_uri

from .completion_folder import CompletionFolder
from .conversations import RowSkipped
from .on_policy import PromptConversation
from .sources import Source, parse_line, read_all_rows


def read_prompts(
    sources: list[Source], folder: CompletionFolder, *, endpoint_url: str | None = None, max_rows: int | None = None
) -> Iterator[PromptConversation]:
    """
    Reads the prompts that `folder` has no answer to. Rows that are no prompts, and those with an id that an earlier row
    has, are listed as failed.

    Args:
        sources (`list[Source]`):
            What [`~data.sources.list_sources`] found.
        folder ([`~data.completion_folder.CompletionFolder`]):
            Where the answers go.
        endpoint_url (`str`, *optional*):
            Address of the object store, if not Amazon's.
        max_rows (`int`, *optional*):
            Only the first rows.
    """
    seen: set[str] = set()
    rows = read_all_rows(sources, endpoint_url=endpoint_url)
    for where, content in itertools.islice(rows, max_rows):
        try:
            conversation = PromptConversation(parse_line(content))
        except RowSkipped as skipped:
            folder.fail(None, skipped.reason, str(skipped), where)
            continue
        if conversation.id in seen:
            folder.fail(conversation.id, "duplicate_id", "an earlier row has the same id", where)
            continue
        seen.add(conversation.id)
        if conversation.id not in folder.answered:
            yield conversation


def count_prompts(sources: list[Source], max_rows: int | None = None) -> int | None:
    """The number of prompts, for the progress bar; `None` if they would have to be downloaded to be counted."""
    if any(is_object_uri(source.uri) for source in sources):
        return max_rows
    count = sum(1 for _ in read_all_rows(sources))
    return count if max_rows is None else min(count, max_rows)
