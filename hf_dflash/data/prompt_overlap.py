# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What two prompts have in common: words in a row with an evaluation prompt, or nearly all words with another one."""

import re
from collections.abc import Iterator

import numpy as np


# Permutations of a MinHash: the standard error of the estimated similarity is at most 0.06.
_NUM_PERMUTATIONS = 64
# Fewer words in a row say nothing.
FEWEST_WORDS = 4


def words_of(messages: list[dict]) -> list[str]:
    """Lower-case words of the user turns. System prompts are left out: whole sources share them."""
    text = "\n".join(message["content"] for message in messages if message["role"] == "user")
    return re.findall(r"\w+", text.lower())


class EvaluationOverlap:
    """
    Finds prompts that share `words` words in a row with an evaluation prompt, or all words of a shorter one.

    Args:
        prompts (`list[list[str]]`):
            Words of the evaluation prompts.
        words (`int`, *optional*, defaults to 10):
            Length of what is compared. An evaluation prompt of fewer than 4 words is not looked for.
    """

    def __init__(self, prompts: list[list[str]], words: int = 10):
        self._grams: dict[int, set[int]] = {}
        for prompt in prompts:
            length = min(words, len(prompt))
            if length >= FEWEST_WORDS:
                self._grams.setdefault(length, set()).update(_grams(prompt, length))

    def __contains__(self, words: list[str]) -> bool:
        return any(not known.isdisjoint(_grams(words, length)) for length, known in self._grams.items())


def _grams(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(length)), strict=False)


class NearDuplicates:
    """
    Remembers prompts by their MinHash, and finds those that are nearly the same.

    Args:
        similarity (`float`, *optional*, defaults to 0.8):
            Jaccard similarity of the word n-grams from which on a prompt is a near-duplicate.
        words (`int`, *optional*, defaults to 5):
            Length of an n-gram.

    Raises:
        `ImportError`: datasketch is not installed.
    """

    def __init__(self, similarity: float = 0.8, words: int = 5):
        try:
            from datasketch import MinHashLSH
        except ImportError:
            raise ImportError(
                "Removing near-duplicates needs the package datasketch: pip install 'hf-dflash[data]'"
            ) from None
        if not 0 < similarity <= 1:
            raise ValueError(f"similarity must be in (0, 1], but is {similarity}.")
        self.similarity, self.words = similarity, words
        self._index = MinHashLSH(threshold=similarity, num_perm=_NUM_PERMUTATIONS)
        self._hashes: list[np.ndarray] = []

    def add_unless_known(self, words: list[str]) -> bool:
        """Remembers a prompt, and returns `True`, unless a similar one is known."""
        from datasketch import MinHash

        grams = [" ".join(gram).encode() for gram in _grams(words, min(self.words, len(words)))]
        minhash = MinHash(num_perm=_NUM_PERMUTATIONS)
        minhash.update_batch(grams or [b""])
        for candidate in self._index.query(minhash):
            if np.mean(self._hashes[candidate] == minhash.hashvalues) >= self.similarity:
                return False
        self._index.insert(len(self._hashes), minhash, check_duplication=False)
        self._hashes.append(minhash.hashvalues.astype(np.uint32))
        return True
