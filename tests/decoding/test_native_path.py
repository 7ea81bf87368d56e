# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""transformers' own DFlash decoding works with our drafter on dense targets, and agrees with ours block by block."""

import pytest
import torch
from oracle_drafter import make_drafter, make_oracle
from tiny_models import make_target

from hf_dflash.decoding.speculative import speculative_generate


pytestmark = pytest.mark.compat

# No token of the vocabulary: decoding stops at the length only.
NEVER = 10_000


def generate_natively(target, drafter, input_ids, **kwargs):
    """Tokens, and the acceptance lengths as the drafter sees them: the context that each of its passes adds."""
    added = []
    handle = drafter.register_forward_pre_hook(
        lambda module, args, kwargs: added.append(kwargs["context_hidden_states"].shape[1]), with_kwargs=True
    )
    sequences = target.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=drafter,
        speculation_type="dflash",
        do_sample=False,
        **kwargs,
    )
    handle.remove()
    assert added[0] == input_ids.shape[1]
    return sequences, added[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_sliding"])
@pytest.mark.parametrize("drafter_window", [None, 8])
def test_native_path_gives_the_greedy_output_and_our_acceptance_lengths(kind, dtype, drafter_window):
    target = make_target(kind, dtype)
    input_ids = torch.randint(3, 95, (1, 11))
    plain = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=44, do_sample=False, eos_token_id=NEVER
    )
    oracle = make_oracle(target, 5, sliding_window=drafter_window)
    num_right = [0, 4, 2, 1, 3, 4, 4, 0, 1, 2, 3, 3, 1, 0, 0, 4] * 2

    def plan():
        counts = iter(num_right)
        return oracle.plan([plain[0].tolist()], lambda: next(counts))

    sequences, native_lengths = generate_natively(target, plan(), input_ids, max_new_tokens=36, eos_token_id=NEVER)
    ours = speculative_generate(target, plan(), input_ids, max_new_tokens=36, eos_token_id=NEVER)
    assert sequences.tolist() == ours.sequences.tolist() == plain[:, :47].tolist()
    # The native path tells the drafter of a block when it asks for the next one, so not of its last block or two.
    assert len(ours.acceptance_lengths[0]) - 2 <= len(native_lengths) < len(ours.acceptance_lengths[0])
    assert native_lengths == ours.acceptance_lengths[0][: len(native_lengths)]
    assert set(native_lengths) == {1, 2, 3, 4, 5}


def test_native_path_shows_a_real_drafter_what_ours_shows_it():
    target = make_target("qwen3", torch.float64)
    drafter = make_drafter(target)
    input_ids = torch.randint(3, 95, (1, 11))

    def record(decode):
        calls = []
        handle = drafter.register_forward_hook(
            lambda m, args, kwargs, out: calls.append(kwargs | out), with_kwargs=True
        )
        decode()
        handle.remove()
        return calls

    native = record(lambda: generate_natively(target, drafter, input_ids, max_new_tokens=12))
    ours = record(lambda: speculative_generate(target, drafter, input_ids, max_new_tokens=12))
    assert len(native) == len(ours) > 1
    for theirs, own in zip(native, ours, strict=True):
        assert torch.equal(theirs["position_ids"], own["position_ids"])
        for name in ("noise_embeds", "context_hidden_states", "last_hidden_state"):
            torch.testing.assert_close(theirs[name], own[name], rtol=0, atol=1e-10)
