# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest
import torch
from tiny_tokenizers import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_dflash.data.generate_command import main
from hf_dflash.data.tokenization import tokenize_completions


TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def write_prompt(path):
    path.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "What is 1 + 7?"}]}) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "There is no prompt in .*prompts.jsonl"),
        ("{not json\n", "Not one of 1 prompts.*prompts.jsonl:1: .*bad_json|JSON"),
    ],
)
def test_a_run_without_one_answer_is_an_error_that_says_why(tmp_path, target_folder, lines, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(lines)
    with pytest.raises(ValueError, match=message):
        main([str(prompts), str(tmp_path / "out"), "--target", str(target_folder), "--devices", "cpu"])


def test_the_target_is_asked_with_the_template_that_it_is_served_with_and_tokenize_does_the_same(
    tmp_path, target_folder
):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    run = [write_prompt(tmp_path / "prompts.jsonl"), str(tmp_path / "out"), "--target", str(target_folder)]
    run += ["--devices", "cpu", "--dtype", "float64", "--max_new_tokens", "6", "--no_limits"]
    assert main([*run, "--chat-template", str(template)]) == 0

    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    prompt = tokenizer("user: What is 1 + 7?\nassistant:", return_tensors="pt", add_special_tokens=False)["input_ids"]
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float64)
    expected = target.generate(prompt, max_new_tokens=6, do_sample=False)[0].tolist()
    options = {"chat_template": TEMPLATE, "num_workers": 1, "gates": None, "disable_tqdm": True}
    (sample,) = tokenize_completions(tmp_path / "out", target_folder, tmp_path / "tokens", **options)
    assert sample["input_ids"] == expected and sum(sample["loss_mask"]) == len(expected) - prompt.shape[1]

    with pytest.raises(ValueError, match="chat_template_digest"):
        main(run)


def test_a_target_without_a_template_is_refused_at_once_and_a_server_has_its_own(tmp_path):
    prompts = write_prompt(tmp_path / "prompts.jsonl")
    make_tokenizer(None).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="no chat template.*--chat-template FILE"):
        main([prompts, str(tmp_path / "out"), "--target", str(tmp_path / "bare")])
    with pytest.raises(ValueError, match="--chat_template is for --target. A server is given its template"):
        main([prompts, str(tmp_path / "out"), "--server", "http://localhost:1/v1", "--chat-template", "x.jinja"])
    assert not (tmp_path / "out").exists()
