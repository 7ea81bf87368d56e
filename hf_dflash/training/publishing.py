# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The trainer's side of the Hub: what is pushed in mid-run and at the end, and the card.

Whatever is pushed, and whenever, `main` is a drafter that loads: bf16 weights, config, code and card in one commit, and the
serving form on a branch. `Trainer` would upload the whole output folder instead, the tokenized dataset included.
"""

import queue
import shutil
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging

from ..hub.commits import commit_folder
from ..hub.drafter_files import merge_adapter
from ..hub.model_card import CURVES_FILE, create_drafter_card, is_local_path
from ..hub.portability import SERVING_ENGINES, find_problems
from ..hub.publishing import push_to_hub
from .checkpoint import link_folder
from .curves import plot_curves
from .training_record import describe_training
from .uploads import Uploads


logger = logging.get_logger(__name__)

# Links to checkpoints that wait for their upload. Hidden: nothing else looks for checkpoints there.
_STAGING = ".hub_uploads"


class BackgroundPushes:
    """
    One push after another, in a thread that does not keep the process alive. `Trainer` waits for it where it has to.

    Args:
        uploads ([`Uploads`]): is told what is under way.
    """

    def __init__(self, uploads: Uploads):
        self.uploads = uploads
        self.jobs: list[Future] = []
        self._waiting: queue.Queue = queue.Queue()
        threading.Thread(target=self._run, name="pushes to the Hub", daemon=True).start()

    def submit(self, push, name: str) -> Future:
        job = Future()
        self.uploads.begin(name, "the Hub")
        self.jobs = [job for job in self.jobs if not job.done()] + [job]
        self._waiting.put((push, job, name))
        return job

    def is_done(self) -> bool:
        return all(job.done() for job in self.jobs)

    def wait_until_done(self) -> None:
        wait(self.jobs)

    def _run(self) -> None:
        while True:
            push, job, name = self._waiting.get()
            try:
                commit = push()
                self.uploads.end(name, "the Hub")
                job.set_result(commit)
            except Exception as error:  # noqa: BLE001 - a push that fails, for whatever reason, must not end training
                logger.warning(f"A push to the Hub failed; training goes on. {type(error).__name__}: {error}")
                self.uploads.end(name, "the Hub", f"{type(error).__name__}: {error}")
                job.set_exception(error)


class HubPublishing:
    """The part of [`DFlashTrainer`] that knows the Hub. Comes before `Trainer` among its bases."""

    @property
    def target_hub_id(self) -> str:
        """The target's Hub id.

        Raises:
            `ValueError`: if only a folder is known, which nobody else could load.
        """
        names = (self.args.target_hub_id, self.drafter_config.target_name_or_path, self.target.model.name_or_path)
        for name in names:
            if name and not is_local_path(name):
                return name
        raise ValueError(
            f"Card and commands on the Hub have to name the target, and {next(filter(None, names), 'its name')} is no Hub id: "
            "pass `--target_hub_id`."
        )

    def create_model_card(
        self, license: str | None = None, dataset_tags: list[str] | None = None, tags: list[str] | None = None
    ) -> None:
        """
        Writes `README.md` and the picture of the curves into `output_dir`.

        Args:
            license (`str`, *optional*): of the weights; `--hub_license` by default.
            dataset_tags (`list[str]`, *optional*): Hub ids of the data; `--hub_datasets` by default.
            tags (`list[str]`, *optional*): further tags.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            target_name = self.target_hub_id
        except ValueError:
            target_name = None
        create_drafter_card(
            self.drafter_config,
            target_name=target_name,
            repo_id=self.hub_model_id or self.args.hub_model_id or folder.absolute().name,
            serving_revision=self._serving_revision(self.args.hub_revision) if self.hub_model_id else None,
            native_revision=self.args.hub_revision,
            record=describe_training(self, license=license, datasets=dataset_tags),
            has_curves=draw_curves(self.state.log_history, folder / CURVES_FILE),
            tags=[*self._tag_names, *(tags or [])],
        ).save(folder / "README.md")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs,
    ) -> CommitInfo | Future | None:
        """
        Publishes the drafter as it is now, in bf16: the native form on `main`, the serving form on the branch `serving`.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`): of both commits.
            blocking (`bool`, *optional*, defaults to `True`): whether to wait until both are there.
            token (`str`, *optional*): `--hub_token` by default.
            revision (`str`, *optional*):
                The branch of the native form, `--hub_revision` by default. Beside a branch that is not `main`, the serving
                form's is called `serving-<branch>`.
            kwargs: of [`~DFlashTrainer.create_model_card`].

        Returns:
            `CommitInfo` of the native form, a `Future` of it if not `blocking`; `None` on all ranks but the first.

        Raises:
            `ValueError`: if the target's Hub id is not known, or the drafter cannot be published.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        self.create_model_card(**kwargs)
        record = describe_training(self, license=kwargs.get("license"), datasets=kwargs.get("dataset_tags"))
        push = self._prepare_push(
            Path(self.args.output_dir), commit_message, record, token=token, revision=revision, tags=kwargs.get("tags")
        )
        return push() if blocking else self._pushes().submit(push, commit_message)

    def publish_checkpoint(self, folder: str) -> None:
        """Pushes a checkpoint in the background, as `hub_strategy` wants it. Training does not wait."""
        strategy = HubStrategy(self.args.hub_strategy)
        if not self.args.push_to_hub or strategy == HubStrategy.END or not self.is_world_process_zero():
            return
        # A run that was asked to stop has seconds, not minutes.
        is_busy = not self._pushes().is_done()
        if self._stop_callback.is_stopping or (is_busy and not self.args.hub_always_push):
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        path_in_repo = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(folder).name}
        message = f"Training in progress, step {self.state.global_step}"
        self._pushes().submit(
            self._prepare_push(
                Path(folder), message, describe_training(self), checkpoint_in_repo=path_in_repo.get(strategy)
            ),
            Path(folder).name,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing yet: [`~DFlashTrainer.publish_checkpoint`] follows once the checkpoint is whole."""

    def _finish_current_push(self) -> None:
        # Neither does a stop wait for a push: it was not the last word on this run.
        if not self._stop_callback.is_stopping:
            super()._finish_current_push()

    def _pushes(self) -> BackgroundPushes:
        if self.push_in_progress is None:
            shutil.rmtree(Path(self.args.output_dir, _STAGING), ignore_errors=True)
            self.push_in_progress = BackgroundPushes(self.uploads)
        return self.push_in_progress

    def _serving_revision(self, revision: str | None) -> str | None:
        """The branch for engines, `None` if all of them would compute something else than was trained."""
        if not self._engines():
            logger.warning_once(
                "No serving form is pushed, for no engine would compute what is trained here. "
                + " ".join(map(str, find_problems(self.drafter_config)))
            )
            return None
        return "serving" if revision in (None, "main") else f"serving-{revision}"

    def _engines(self) -> tuple[str, ...]:
        refused = {problem.engine for problem in find_problems(self.drafter_config)}
        return tuple(engine for engine in SERVING_ENGINES if engine not in refused)

    def _prepare_push(
        self, folder: Path, message: str, record, *, token=None, revision=None, tags=None, checkpoint_in_repo=None
    ):
        """Takes what must be taken now, and returns a function that uploads it at any time."""
        token = token if token is not None else self.args.hub_token
        revision = revision if revision is not None else self.args.hub_revision
        # Rotation cannot take links away.
        staging = Path(self.args.output_dir, _STAGING, f"{time.time_ns():020}")
        drafter, checkpoint = staging / "drafter", staging / "checkpoint"
        if (folder / "adapter_config.json").is_file():
            merge_adapter(self.accelerator.unwrap_model(self.model)).save_pretrained(drafter)
        else:
            link_folder(folder, drafter, patterns=("config.json", "model*.safetensors*"))
        if checkpoint_in_repo is not None:
            link_folder(folder, checkpoint)
        repo_id, history = self.hub_model_id, list(self.state.log_history)
        options = {
            "target": self.target.model.config,
            "target_name": self.target_hub_id,
            "engines": self._engines(),
            "record": record,
            "tags": [*self._tag_names, *(tags or [])],
            "revision": revision,
            "serving_revision": self._serving_revision(revision),
            "commit_message": message,
            "private": self.args.hub_private_repo,
            "token": token,
        }

        def push() -> CommitInfo:
            try:
                draw_curves(history, staging / CURVES_FILE)
                commit = push_to_hub(drafter, repo_id, curves=staging / CURVES_FILE, **options)
                if checkpoint_in_repo is not None:
                    commit_folder(
                        HfApi(token=token),
                        repo_id,
                        checkpoint,
                        f"{message}, checkpoint",
                        revision=revision,
                        path_in_repo=checkpoint_in_repo,
                        remove_others=True,
                    )
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            return commit

        return push


def draw_curves(log_history: list[dict], path: Path) -> bool:
    """Draws the curves if there is something to draw and matplotlib is there; whether there is a picture now."""
    if not any("loss" in entry for entry in log_history):
        return False
    try:
        plot_curves(log_history, str(path))
    except ImportError as error:
        logger.warning_once(f"The card has no curves. {error}")
        return False
    return True
