# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import gzip

import pytest
from transformers import PreTrainedTokenizerFast

from hf_dflash.evaluation.prompts import encode_prompt, load_prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ("[1]\n", "line 1: a row is an object"),
        ('{"text": "a"}\n', r"line 1: a prompt has .* this row has \['text'\]"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "line 1: `messages` must end with a user turn"),
        ('{"turns": ["a", ""]}\n', "line 1: a user turn is a non-empty string"),
        ('{"turns": "Hello"}\n', "line 1: a user turn is a non-empty string, and `turns` a list of them"),
        ('{"messages": "Hello"}\n', "line 1: `messages` is a list of objects"),
        ('{"messages": ["a"]}\n', "line 1: `messages` is a list of objects"),
        ('{"messages": [{"role": "user"}]}\n', "line 1: a user turn is a non-empty string"),
    ],
)
def test_bad_prompt_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_rows_get_ids_and_domains(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "id": 7, "source": "mt_bench/stem"}\n')
    rows = load_prompts(path)
    assert [(row["id"], row["domain"]) for row in rows] == [("gsm8k:1", "gsm8k"), ("7", "mt_bench/stem")]
    compressed = tmp_path / "gsm8k.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_prompts(compressed) == rows


def test_a_prompt_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}'))
    with pytest.raises(ValueError, match="prompts.jsonl, line 1: not JSON"):
        load_prompts(path)


def test_thinking_is_passed_to_the_template(tokenizer):
    messages = [{"role": "user", "content": "w9"}]
    with_thinking = encode_prompt(tokenizer, messages, True)[0].tolist()
    without = encode_prompt(tokenizer, messages, False)[0].tolist()
    assert with_thinking == [*without, tokenizer.convert_tokens_to_ids("think")]


def test_without_a_word_about_thinking_the_template_decides_as_it_does_when_completions_are_written(tokenizer):
    messages = [{"role": "user", "content": "w9"}]
    thinks = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    thinks.chat_template = "{{ messages[0].content }} {{ 'w10' if enable_thinking is not defined else 'w11' }}"
    assert encode_prompt(thinks, messages)[0].tolist() == [9, 10]
    assert encode_prompt(thinks, messages, True)[0].tolist() == [9, 11]


def test_a_conversation_is_not_cut_down_to_its_last_message_where_there_is_no_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert encode_prompt(bare, [{"role": "user", "content": "w9"}])[0].tolist() == [9]
    with pytest.raises(ValueError, match="no chat template, which a conversation of 2 messages needs"):
        encode_prompt(bare, [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}])
