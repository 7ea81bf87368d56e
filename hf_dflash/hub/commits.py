# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Folders become commits: whole ones, so that nobody downloads half a drafter."""

from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi


def commit_folder(
    api: HfApi,
    repo_id: str,
    folder: str | Path,
    message: str,
    *,
    revision: str | None = None,
    path_in_repo: str = "",
    remove_others: bool = False,
    remove: tuple[str, ...] = (),
) -> CommitInfo:
    """
    Uploads a folder in one commit, whatever its size; `upload_folder` may make several, of which the first ones do not load.

    Args:
        api (`HfApi`): with the token.
        repo_id (`str`): an existing repository.
        folder (`str` or `Path`): all of whose files are uploaded.
        message (`str`): of the commit.
        revision (`str`, *optional*): an existing branch; `main` by default.
        path_in_repo (`str`, *optional*): the folder in the repository; its root by default.
        remove_others (`bool`, *optional*, defaults to `False`): deletes what is there and not in `folder`.
        remove (`tuple[str]`, *optional*, defaults to `()`): files of the repository that are deleted where they are there.

    Returns:
        `huggingface_hub.CommitInfo`.

    Raises:
        `huggingface_hub.errors.HfHubHTTPError`: if the Hub refuses.
    """
    folder = Path(folder)
    prefix = f"{path_in_repo}/" if path_in_repo else ""
    files = {
        prefix + path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    operations = [CommitOperationAdd(name, path) for name, path in files.items()]
    if remove_others or remove:
        # `.gitattributes` says which files are large ones.
        there = [name for name in api.list_repo_files(repo_id, revision=revision) if name != ".gitattributes"]
        gone = [name for name in there if (remove_others and name.startswith(prefix)) or name in remove]
        gone = [name for name in gone if name not in files]
        operations += [CommitOperationDelete(name, is_folder=False) for name in gone]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)
