# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[2]


def test_the_table_of_options_is_current():
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "write_options.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
