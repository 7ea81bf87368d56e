# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import numpy as np

from hf_dflash.data.tokenized_dataset import hash_reply


def test_equal_replies_have_equal_hashes_and_others_do_not():
    ids = np.arange(1000, dtype=np.int32)
    assert hash_reply(ids) == hash_reply(ids.copy()) != hash_reply(ids[1:])
    assert -(2**63) <= hash_reply(ids) < 2**63
