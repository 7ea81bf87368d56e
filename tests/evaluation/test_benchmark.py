# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
import torch
from oracle_drafter import make_drafter, make_oracle
from tiny_models import make_target

from hf_dflash.evaluation.benchmark import find_first_difference, measure_acceptance
from hf_dflash.evaluation.prompts import encode_prompt


def test_decoding_prompts_gives_what_an_oracle_dictates(tokenizer):
    target = make_target("qwen3_5", torch.float64)
    rows = [
        {"id": "one", "messages": [{"role": "user", "content": "w9 w10"}]},
        {"id": "two", "prompt": "w33", "domain": "other"},
    ]
    sequences = []
    for row in rows:
        input_ids = encode_prompt(tokenizer, row.get("messages") or [{"role": "user", "content": "w33"}], True)
        mask = torch.ones_like(input_ids)
        sequences.append(
            target.generate(input_ids, attention_mask=mask, max_new_tokens=40, eos_token_id=10_000)[0].tolist()
        )
    oracle = make_oracle(target, block_size=4).plan(sequences, lambda: 2)
    report = measure_acceptance(
        target,
        oracle,
        rows,
        tokenizer,
        max_new_tokens=10,
        eos_token_id=10_000,
        enable_thinking=True,
        progress=False,
    )
    assert [r.acceptance_lengths for r in report.results] == [[3, 3, 3], [3, 3, 3]]
    assert [r.first_difference for r in report.results] == [-1, -1]
    assert [r.num_target_passes for r in report.results] == [4, 4]
    assert report.domains == ["prompts", "other"]
    assert report.acceptance_length == 3
    json.dumps(report.to_dict())


def test_turns_are_asked_one_after_the_other_with_the_targets_own_answers(tokenizer):
    target = make_target("qwen3", torch.float64)
    drafter = make_drafter(target)
    prompts = [{"id": "talk", "turns": ["w9", "w10 w11"]}]
    report = measure_acceptance(
        target, drafter, prompts, tokenizer, max_new_tokens=6, enable_thinking=True, progress=False
    )
    assert [r.id for r in report.results] == ["talk", "talk/turn2"]
    first = encode_prompt(tokenizer, [{"role": "user", "content": "w9"}], True)
    answer = target.generate(first, attention_mask=torch.ones_like(first), max_new_tokens=6)[0, first.shape[1] :]
    kept = [token for token in answer.tolist() if token not in tokenizer.all_special_ids]
    # user w9 end assistant <answer> end user w10 w11 end assistant think
    assert report.results[1].num_prompt_tokens == 4 + len(kept) + 1 + 4 + 2


def measured_settings(target, tokenizer, **options):
    options = {"max_new_tokens": 3, "progress": False, "compare_with_plain": False, **options}
    return measure_acceptance(target, make_drafter(target), [{"prompt": "w9"}], tokenizer, **options).settings


@pytest.mark.compat
def test_settings_name_what_decides_the_tokens_wherever_it_comes_from(tokenizer):
    target = make_target("qwen3")
    assert not measured_settings(target, tokenizer).keys() & {"temperature", "top_k", "top_p", "repetition_penalty"}
    target.generation_config.temperature, target.generation_config.repetition_penalty = 0.7, 1.3
    greedy = measured_settings(target, tokenizer)
    assert greedy["repetition_penalty"] == 1.3 and "temperature" not in greedy
    drawn = measured_settings(target, tokenizer, do_sample=True, top_p=0.9)
    # 50 is the one of `generate` itself.
    assert [drawn[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")] == [0.7, 0.9, 50, 1.3]


def test_a_prompt_that_does_not_fit_the_targets_context_is_named(tokenizer, caplog):
    target = make_target("qwen3")
    target.config.max_position_embeddings = 8
    measured_settings(target, tokenizer, max_new_tokens=4)
    assert not caplog.records
    measured_settings(target, tokenizer, max_new_tokens=5)
    assert "Prompt 0 and its reply may take 4 + 5 tokens, but the target was made for 8" in caplog.text


def test_first_difference_counts_the_end_of_the_shorter_sequence():
    tokens = torch.tensor([1, 2, 3])
    assert find_first_difference(tokens, torch.tensor([1, 2, 3])) == -1
    assert find_first_difference(tokens, torch.tensor([1, 9, 3])) == 1
    assert find_first_difference(tokens, torch.tensor([1, 2])) == 2
