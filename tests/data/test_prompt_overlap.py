# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import random

from mixture_examples import FILLER

from hf_dflash.data.prompt_overlap import EvaluationOverlap, NearDuplicates


def jaccard(first, second, length=5):
    def grams(words):
        return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}

    return len(grams(first) & grams(second)) / len(grams(first) | grams(second))


def test_near_duplicates_are_those_of_brute_force_away_from_the_border():
    draw = random.Random(0)
    texts = [[draw.choice(FILLER) for _ in range(120)] for _ in range(60)]
    for text in texts[:60]:
        changed = list(text)
        for _ in range(draw.choice([0, 1, 1, 4, 8, 20])):
            changed[draw.randrange(120)] = f"new{draw.randrange(1000)}"
        texts.append(changed)
    known, kept = NearDuplicates(similarity=0.7), []
    compared = {True: 0, False: 0}
    for text in texts:
        highest = max((jaccard(text, other) for other in kept), default=0.0)
        is_new = known.add_unless_known(text)
        if not 0.5 < highest < 0.86:
            assert is_new == (highest < 0.7), highest
            compared[is_new] += 1
        if is_new:
            kept.append(text)
    assert min(compared.values()) > 15


def test_overlap_with_evaluation_prompts_is_ten_words_in_a_row():
    evaluation = [FILLER[:15], ["what", "is", "two", "plus", "two"], ["too", "short"]]
    overlap = EvaluationOverlap(evaluation, words=10)
    assert ["x", *FILLER[3:13], "y"] in overlap
    assert ["x", *FILLER[3:12], "y"] not in overlap
    assert ["hello", "what", "is", "two", "plus", "two"] in overlap
    assert ["too", "short"] not in overlap
