# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Small fast tokenizers with a chat template, trained in a moment, for tests that need no model."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


# Like Qwen3.5: the generation prompt opens thinking, earlier turns lose theirs, and `enable_thinking=False` closes it.
THINKING_TEMPLATE = """
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content | trim %}
        {%- set reasoning = message.reasoning_content | default('') | trim %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set content = content.split('</think>')[-1] | trim %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query %}{{- '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n<think>\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\n</think>\n\n' }}{% endif %}
{%- endif %}"""

# ChatML without any thinking.
CHATML_TEMPLATE = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

_TEXT = [
    "The answer to the question is that the sum of the numbers is seven.",
    "def add(a, b):\n    return a + b\n\nprint(add(3, 4))",
    "Let me think about the question: which of the two is larger, and why?",
    "Paris is the capital of France; London is the capital of England.",
]


def make_tokenizer(
    template: str = CHATML_TEMPLATE,
    *,
    special_tokens: tuple[str, ...] = ("<|im_start|>", "<|im_end|>"),
    eos_token: str = "<|im_end|>",
    vocab_size: int = 400,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, so any text is encoded without loss."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", *special_tokens],
        show_progress=False,
    )
    core.train_from_iterator(_TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in special_tokens if token != eos_token],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def special_tokens_of(template: str) -> tuple[str, ...]:
    """What looks like a special token in a template: `<|...|>`, `<｜...｜>`, `</s>`, `[INST]`, `<end_of_turn>` ..."""
    pattern = r"<\|[^|<>\s]+\|>|<｜[^｜\s]+｜>|</?s>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]"
    return tuple(sorted(set(re.findall(pattern, template))))
