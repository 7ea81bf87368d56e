# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json

import pytest

from hf_dflash.training.checkpoint import CHECKPOINT_FILE, find_last_checkpoint, mark_whole


pytestmark = pytest.mark.compat


@pytest.mark.parametrize("is_of_an_earlier_release", [False, True])
def test_the_last_checkpoint_is_the_runs_own_however_often_it_went_back(is_of_an_earlier_release, tmp_path):
    def save(step):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        mark_whole(folder, {})
        assert find_last_checkpoint(tmp_path) == str(folder)
        return folder / CHECKPOINT_FILE

    for step in (2, 4, 6, 8):
        marker = save(step)
        if is_of_an_earlier_release:
            # It neither numbered its saves nor said what was left behind.
            marker.write_text(json.dumps({"contract": {}, "files": {}}))
    # To 4, to 5, behind the whole of it, and on over what was left behind.
    for step in (5, 7, 6, 3, 4, 8):
        save(step)
