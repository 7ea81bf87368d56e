# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash tokenize` that kills itself with SIGKILL. Who kills from outside may look too late, if the machine is busy.

python tests/data/dying_tokenize.py unit 5 ARGUMENTS...      with 5 units done, in the middle of the next
python tests/data/dying_tokenize.py upload 3 ARGUMENTS...    with 3 files uploaded, in the middle of others
"""

import itertools
import os
import signal
import sys

from hf_dflash import cli
from hf_dflash.data.unit_tokenization import UnitTokenizer
from hf_dflash.object_store import ObjectStore


def die_after(cls, name, number):
    """Makes the call of a method that is number `number` the last thing that this process does."""
    method, calls = getattr(cls, name), itertools.count(1)

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, name, call)


if __name__ == "__main__":
    moment, number, *arguments = sys.argv[1:]
    if moment == "unit":
        # Its rows are samples, and its files are open.
        die_after(UnitTokenizer, "_process_rows", int(number) + 1)
    else:
        die_after(ObjectStore, "upload_file", int(number))
    sys.exit(cli.main(["tokenize", *arguments]))
