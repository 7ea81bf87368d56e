# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import gzip
import json
from pathlib import Path

import pytest
from tiny_tokenizers import CHATML_TEMPLATE, THINKING_TEMPLATE, make_tokenizer, special_tokens_of
from transformers import AutoTokenizer

from hf_dflash.data.chat import render_conversation
from hf_dflash.data.conversations import RowSkipped


POCKET = Path(__file__).parents[2] / "recipes" / "pocket"
USER = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture(scope="module")
def chatml():
    return make_tokenizer(CHATML_TEMPLATE)


@pytest.fixture(scope="module")
def thinking():
    return make_tokenizer(THINKING_TEMPLATE)


def supervised_text(tokenizer, sample):
    return tokenizer.decode([i for i, m in zip(sample.input_ids, sample.loss_mask, strict=True) if m])


def prompt_ids(sample):
    """The unsupervised prefix; fails if anything behind it is unsupervised."""
    count = sample.loss_mask.index(True)
    assert all(sample.loss_mask[count:])
    return sample.input_ids[:count]


def served_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)["input_ids"]


def test_a_template_without_generation_tags_gives_reply_and_end_of_turn(chatml):
    (sample,) = render_conversation(chatml, [USER, {"role": "assistant", "content": " It is 7.\n"}])
    assert supervised_text(chatml, sample) == " It is 7.\n<|im_end|>"
    assert prompt_ids(sample) == served_ids(chatml, [USER])
    assert not sample.is_cut


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ({"content": "7", "reasoning_content": "I add."}, "I add.\n</think>\n\n7<|im_end|>"),
        # A server's parser leaves the newlines around the tags in place.
        ({"content": "\n\n7", "reasoning_content": "I add.\n"}, "I add.\n</think>\n\n7<|im_end|>"),
        ({"content": "7", "reasoning": "I add."}, "I add.\n</think>\n\n7<|im_end|>"),
        # Inline, as the target wrote it behind a prompt that opens thinking, and with the tag put back.
        ({"content": "I add.\n</think>\n\n7 "}, "I add.\n</think>\n\n7 <|im_end|>"),
        ({"content": "<think>\nI add.\n</think>\n\n7"}, "I add.\n</think>\n\n7<|im_end|>"),
        ({"content": "I add.\n</think>\n\n7<|im_end|>"}, "I add.\n</think>\n\n7<|im_end|>"),
        # The target closed its thinking at once, and the row says so.
        ({"content": "7", "reasoning_content": ""}, "\n</think>\n\n7<|im_end|>"),
        # Cut while thinking, and while answering: no end of turn is made up.
        ({"content": "", "reasoning_content": "I add"}, "I add"),
        ({"content": None, "reasoning_content": "I add", "finish_reason": "length"}, "I add"),
        ({"content": "I add", "finish_reason": "length"}, "I add"),
        ({"content": "7 is", "reasoning_content": "I add.", "finish_reason": "length"}, "I add.\n</think>\n\n7 is"),
    ],
)
def test_thinking_is_supervised_as_the_target_wrote_it(thinking, reply, expected):
    (sample,) = render_conversation(thinking, [USER, {"role": "assistant", **reply}])
    assert supervised_text(thinking, sample) == expected
    assert prompt_ids(sample) == served_ids(thinking, [USER])
    assert sample.is_cut == (not expected.endswith("<|im_end|>"))


@pytest.mark.parametrize("served", [True, False])
def test_the_prompt_follows_enable_thinking(thinking, served):
    reply = {"role": "assistant", "content": "I add.\n</think>\n\n7" if served else "7"}
    (sample,) = render_conversation(thinking, [USER, reply], enable_thinking=served)
    assert prompt_ids(sample) == served_ids(thinking, [USER], enable_thinking=served)
    assert supervised_text(thinking, sample) == reply["content"] + "<|im_end|>"


@pytest.mark.parametrize(
    ("reply", "enable_thinking", "reason"),
    [
        ({"content": "7"}, None, "thinking_missing"),
        ({"content": "7", "reasoning_content": "I add."}, False, "thinking_unexpected"),
        ({"content": "  \n"}, None, "empty_reply"),
        ({"content": "", "reasoning_content": "\n"}, None, "empty_reply"),
        ({"content": "I add.\n</think>\n\n7<|im_end|>\n<|im_start|>user"}, None, "end_of_turn_in_reply"),
    ],
)
def test_a_reply_that_was_not_served_like_this_is_refused_with_the_reason(thinking, reply, enable_thinking, reason):
    with pytest.raises(RowSkipped) as skipped:
        render_conversation(thinking, [USER, {"role": "assistant", **reply}], enable_thinking=enable_thinking)
    assert skipped.value.reason == reason


def test_each_turn_is_a_sample_with_the_history_as_it_was_served(thinking):
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "7", "reasoning_content": "first thought"},
        {"role": "user", "content": "And 5 + 6?"},
        {"role": "assistant", "content": "11", "reasoning_content": "second thought"},
    ]
    first, second = render_conversation(thinking, messages)
    assert (first.turn, second.turn) == (0, 1)
    assert prompt_ids(first) == served_ids(thinking, messages[:2])
    assert prompt_ids(second) == served_ids(thinking, messages[:4])
    assert "first thought" in supervised_text(thinking, first)
    assert "first thought" not in thinking.decode(second.input_ids)
    assert supervised_text(thinking, second) == "second thought\n</think>\n\n11<|im_end|>"


def test_exact_completion_ids_are_taken_as_they_are(thinking):
    ids = thinking.encode("not canonically") + thinking.encode("tokenized") + [thinking.eos_token_id]
    (sample,) = render_conversation(
        thinking, [USER, {"role": "assistant", "content": "", "completion_token_ids": ids}]
    )
    assert sample.input_ids == served_ids(thinking, [USER]) + ids
    assert sample.loss_mask == [False] * (len(sample.input_ids) - len(ids)) + [True] * len(ids)
    assert not sample.is_cut
    (cut,) = render_conversation(
        thinking, [USER, {"role": "assistant", "content": "", "completion_token_ids": ids[:-1]}]
    )
    assert cut.is_cut


def test_truncation_keeps_the_part_that_fits_and_makes_up_no_end_of_turn(chatml):
    messages = [USER, {"role": "assistant", "content": "a b c d e f g h i j k l m n o p"}]
    (whole,) = render_conversation(chatml, messages)
    start = whole.loss_mask.index(True)
    for max_length in range(start + 1, len(whole.input_ids)):
        (sample,) = render_conversation(chatml, messages, max_length=max_length)
        assert sample.input_ids == whole.input_ids[:max_length]
        assert sample.loss_mask == whole.loss_mask[:max_length]
        assert sample.is_cut and chatml.eos_token_id not in sample.input_ids[start:]
    (sample,) = render_conversation(chatml, messages, max_length=len(whole.input_ids))
    assert not sample.is_cut
    with pytest.raises(RowSkipped, match="prompt_too_long"):
        render_conversation(chatml, messages, max_length=start)


def test_tool_call_arguments_as_object_and_as_text_give_the_same_reply():
    by_items = CHATML_TEMPLATE.replace(
        "message.content +",
        "message.content + ('' if not message.tool_calls else '[' + message.tool_calls[0].function.name + '('"
        " + (message.tool_calls[0].function.arguments | tojson) + ')]') +",
    )
    by_text = by_items.replace(
        "(message.tool_calls[0].function.arguments | tojson)", "message.tool_calls[0].function.arguments"
    )
    expected = b'[add({"a": 3, "b": "\\u00e9"})]<|im_end|>'.decode("unicode_escape")
    for template in (by_items, by_text):
        tokenizer = make_tokenizer(template)
        for arguments in ({"a": 3, "b": "é"}, '{"a":3,"b":"\\u00e9"}'):
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            (sample,) = render_conversation(
                tokenizer, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
            )
            assert supervised_text(tokenizer, sample) == expected
    with pytest.raises(RowSkipped, match="bad_tool_arguments"):
        call = {"function": {"name": "add", "arguments": "{not json"}}
        render_conversation(tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    with pytest.raises(RowSkipped, match="does not print tool calls"):
        call = {"function": {"name": "add", "arguments": {}}}
        render_conversation(
            make_tokenizer(CHATML_TEMPLATE), [USER, {"role": "assistant", "content": "hm", "tool_calls": [call]}]
        )


def test_end_of_turn_and_end_of_sequence_may_differ():
    # Like Phi: <|end|> ends a turn, and the template prints <|endoftext|> behind the last one.
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
    )
    tokenizer = make_tokenizer(
        template, special_tokens=("<|end|>", "<|user|>", "<|assistant|>"), eos_token="<|endoftext|>"
    )
    (sample,) = render_conversation(tokenizer, [USER, {"role": "assistant", "content": "7"}])
    assert supervised_text(tokenizer, sample) == "7<|end|>"


def test_a_header_that_ends_generation_is_the_end_of_turn():
    # Like GLM: nothing is printed behind a reply, the target stops with the header of the next turn.
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    tokenizer = make_tokenizer(template, special_tokens=("<|user|>", "<|assistant|>"), eos_token="<|endoftext|>")
    messages = [USER, {"role": "assistant", "content": "7"}]
    (sample,) = render_conversation(tokenizer, messages)
    assert supervised_text(tokenizer, sample) == "7"
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    (sample,) = render_conversation(tokenizer, messages, eos_token_ids=[user])
    assert supervised_text(tokenizer, sample) == "7<|user|>"


def test_a_template_that_refuses_the_roles_names_its_reason():
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content + '<|im_end|>' }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template)
    with pytest.raises(RowSkipped, match="template_refused: TemplateError: roles must alternate"):
        render_conversation(tokenizer, [USER, USER, {"role": "assistant", "content": "7"}])
    with pytest.raises(RowSkipped, match="starts with the assistant"):
        render_conversation(tokenizer, [{"role": "assistant", "content": "7"}, USER])
    with pytest.raises(RowSkipped, match="no_assistant_turn"):
        render_conversation(tokenizer, [USER])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render_conversation(tokenizer, [USER, {"role": "assistant", "content": "7"}])


def test_special_tokens_are_found_in_a_template():
    assert special_tokens_of(THINKING_TEMPLATE) == ("<|im_end|>", "<|im_start|>")


def test_what_the_pocket_target_generated_is_what_its_messages_render_to():
    """Real completions: the ids that were generated, and the messages that a server would return for them."""
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    with gzip.open(POCKET / "completions_heldout.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:100]
    assert len(rows) == 100
    for row in rows:
        *before, reply = row["messages"]
        (rendered,) = render_conversation(tokenizer, [*before, {**reply, "finish_reason": row["finish_reason"]}])
        (generated,) = render_conversation(
            tokenizer, [*before, {**reply, "completion_token_ids": row["completion_token_ids"]}]
        )
        assert prompt_ids(rendered) == prompt_ids(generated)
        assert supervised_text(tokenizer, rendered) == supervised_text(tokenizer, generated)
        assert rendered.is_cut == generated.is_cut
