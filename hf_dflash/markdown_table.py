# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Text in a Markdown table."""


def table_cell(value) -> str:
    """`value` as text that stays in its cell: datasets and models have any name."""
    return " ".join(str(value).split()).replace("|", "\\|")
