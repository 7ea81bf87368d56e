# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Both saved forms of a drafter, in one repository on the Hub."""

import shutil
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from .commits import commit_folder
from .drafter_files import ADAPTER_FILES, read_native_form
from .layouts import export_drafter, write_native_form
from .model_card import CURVES_FILE, TrainingRecord, create_drafter_card, read_training_record
from .portability import SERVING_ENGINES


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    target: str | PreTrainedConfig | None = None,
    target_name: str | None = None,
    engines: tuple[str, ...] = SERVING_ENGINES,
    record: TrainingRecord | None = None,
    curves: str | Path | None = None,
    tags: list[str] | None = None,
    revision: str | None = None,
    serving_revision: str | None = "serving",
    commit_message: str = "A drafter",
    private: bool | None = None,
    token: str | None = None,
) -> CommitInfo:
    """
    Publishes both forms of a drafter in one repository, in bf16: the native one on `main`, the serving one on a branch.

    Each form arrives whole, in one commit. Nothing else of the folder is uploaded: no checkpoints, data sets or results.

    Args:
        folder (`str` or `Path`): a native drafter.
        repo_id (`str`): where to.
        target, target_name, engines: as in [`export_drafter`], whose checks come first: nothing is uploaded if one fails.
        record ([`TrainingRecord`], *optional*): for the cards; by default that of the card in the folder.
        curves (`str` or `Path`, *optional*): picture for the cards; by default `training_curves.png` in the folder.
        tags (`list[str]`, *optional*): further tags for the native card.
        revision (`str`, *optional*): the branch of the native form, `main` by default; created where missing.
        serving_revision (`str`, *optional*, defaults to `"serving"`):
            The branch that engines are pointed at; `None` for none.
        commit_message (`str`, *optional*, defaults to `"A drafter"`): of both commits.
        private (`bool`, *optional*), token (`str`, *optional*): as in `huggingface_hub`.

    Returns:
        `huggingface_hub.CommitInfo`: of the native form's commit; its `repo_url` is the repository's address.

    Raises:
        `ValueError`, `OSError`: as in [`export_drafter`]; if both forms would have one revision, or `repo_id` is none.
        `huggingface_hub.errors.HfHubHTTPError`: if the Hub refuses.
    """
    if (revision or "main") == serving_revision:
        raise ValueError(f"Both forms cannot be the revision {serving_revision!r}: one would replace the other.")
    api = HfApi(token=token)
    if "/" not in repo_id:
        # The short name of one's own: not all of the Hub's addresses know it, nor do the cards' readers.
        repo_id = f"{api.whoami()['name']}/{repo_id}"
    validate_repo_id(repo_id)
    folder = Path(folder)
    revision = None if revision == "main" else revision
    record = record if record is not None else read_training_record(folder)
    config, tensors = read_native_form(folder)
    with tempfile.TemporaryDirectory() as temporary:
        native, serving = Path(temporary, "native"), Path(temporary, "serving")
        config.target_name_or_path = target_name or config.target_name_or_path
        write_native_form(native, config, tensors)
        curves = Path(curves) if curves is not None else folder / CURVES_FILE
        if curves.is_file():
            shutil.copyfile(curves, native / CURVES_FILE)
        create_drafter_card(
            config,
            form="native",
            target_name=target_name,
            repo_id=repo_id,
            serving_revision=serving_revision,
            native_revision=revision,
            record=record,
            has_curves=curves.is_file(),
            tags=tags,
        ).save(native / "README.md")
        if serving_revision is not None:
            export_drafter(
                native,
                serving,
                target=target,
                target_name=target_name,
                engines=engines,
                repo_id=repo_id,
                revision=serving_revision,
            )

        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = commit_folder(api, repo_id, native, commit_message, revision=revision, remove=ADAPTER_FILES)
        if serving_revision is not None:
            api.create_branch(repo_id, branch=serving_revision, exist_ok=True)
            # The branch starts as a copy of main: what the serving form does not have must go.
            commit_folder(api, repo_id, serving, commit_message, revision=serving_revision, remove_others=True)
    return commit
