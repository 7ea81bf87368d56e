# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Recipes are scripts, not modules of a package."""

import importlib.util
from pathlib import Path

import pytest


RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def load_recipe():
    """A function that imports a recipe by its name."""

    def load(name: str):
        spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
