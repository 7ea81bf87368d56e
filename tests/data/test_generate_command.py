# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest

from hf_dflash.data.generate_command import main


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
