# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModel

import hf_dflash


ROOT = Path(hf_dflash.__file__).parents[1]
HEADER = (
    "# Copyright 2026 The hf_dflash Authors. All rights reserved.\n"
    "# Licensed under the Apache License, Version 2.0; see the LICENSE file.\n"
)
PYTHON_FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("hf_dflash", "tests", "recipes", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.py")
)


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.compat
def test_import_loads_nothing_that_only_some_jobs_need():
    loaded = set(run_python("import sys, hf_dflash; print(*sys.modules)"))
    assert "hf_dflash.drafter.modeling_dflash" in loaded
    heavy = {"datasets", "transformers.trainer", "accelerate", "boto3", "peft", "evaluate", "matplotlib"}
    # The auto classes alone may load some of them (peft brings accelerate): what counts is what we add.
    baseline = set(run_python("import sys; from transformers import AutoModel, PreTrainedModel; print(*sys.modules)"))
    assert not heavy & (loaded - baseline)


@pytest.mark.compat
def test_every_public_name_resolves():
    for name in hf_dflash.__all__:
        assert getattr(hf_dflash, name) is not None
    assert set(hf_dflash.__all__) <= set(dir(hf_dflash))
    with pytest.raises(AttributeError, match="no_such_name"):
        hf_dflash.no_such_name  # noqa: B018


@pytest.mark.compat
def test_import_registers_the_auto_classes():
    config = AutoConfig.for_model("dflash")
    assert type(config) is hf_dflash.DFlashConfig
    assert AutoModel._model_mapping[type(config)] is hf_dflash.DFlashForSpeculation


def test_the_installed_version_is_the_packages_own():
    assert importlib.metadata.version("hf-dflash") == hf_dflash.__version__
    assert f"## {hf_dflash.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    assert "hf_dflash/py.typed" in shipped
    assert "hf_dflash/model_card/drafter_card.md.jinja" in shipped
    for path in (ROOT / "hf_dflash").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT)) in shipped


def test_a_source_distribution_holds_what_its_readme_links_to_and_what_its_tests_read(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        shipped = {path for name in archive.getnames() for path in Path(name.partition("/")[2]).parents}
        shipped |= {Path(name.partition("/")[2]) for name in archive.getnames()}
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    read_by_tests = ["pyproject.toml", "Makefile", "CHANGELOG.md", "docs/write_options.py"]
    assert not {Path(name) for name in [*links, *read_by_tests]} - shipped


@pytest.mark.parametrize("path", PYTHON_FILES, ids=str)
def test_every_python_file_has_the_licence_header(path):
    text = (ROOT / path).read_text()
    assert re.sub(r"\A#!.*\n", "", text).startswith(HEADER)
