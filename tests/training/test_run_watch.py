# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import logging

import pytest
import torch
from oracle_drafter import make_drafter
from tiny_models import make_target
from tiny_tokenizers import make_tokenizer
from tiny_training import assert_same, heard_by_pytest, make_dataset, make_trainer, training_state

from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.monitor.history import RunHistory
from hf_dflash.monitor.run_log import RUN_LOG
from hf_dflash.training import run_watch
from hf_dflash.training.decoded_samples import describe_sample, mark_tokens
from hf_dflash.training.uploads import Uploads


pytestmark = pytest.mark.compat


def rows_of(folder, event=None):
    rows = [json.loads(line) for line in (folder / RUN_LOG).read_text().splitlines()]
    return rows if event is None else [row for row in rows if row.get("event") == event]


def held_out(**options):
    return {"eval_dataset": make_dataset(4, seed=2), "eval_strategy": "steps", "eval_steps": 3, **options}


def test_the_run_log_holds_what_the_trainer_logged_and_what_happened(tmp_path):
    options = held_out(acceptance_steps=3, save_strategy="steps", save_steps=3, max_steps=6)
    trainer = make_trainer(tmp_path, **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    written = [row for row in rows_of(tmp_path) if "event" not in row and len(row) > 2]
    assert [set(row) - {"time"} for row in written] == [set(entry) for entry in logged]
    for row, entry in zip(written, logged, strict=True):
        assert {k: row[k] for k in entry} == {
            k: v if isinstance(v, int) else pytest.approx(v, rel=1e-5) for k, v in entry.items()
        }
    assert [row["step"] for row in rows_of(tmp_path, "checkpoint")] == [3, 6]
    assert all(row["bytes"] > 1000 for row in rows_of(tmp_path, "checkpoint"))
    (begin,) = rows_of(tmp_path, "begin")
    assert (begin["step"], begin["run"]["max_steps"], begin["run"]["block_size"]) == (0, 6, 4)
    assert begin["run"]["name"] == tmp_path.name
    assert [row["how"] for row in rows_of(tmp_path, "end")] == ["finished"]
    for row in rows_of(tmp_path, "decoded"):
        assert len(row["acceptance_by_slot"]) == 3 and len(row["samples"]) == 2


def test_watching_changes_nothing_of_the_training(tmp_path):
    states = []
    for run_log in (True, False):
        trainer = make_trainer(tmp_path / str(run_log), run_log=run_log, max_steps=4, **held_out())
        trainer.train()
        states.append(training_state(trainer))
    assert_same(*states)
    assert not (tmp_path / "False" / RUN_LOG).exists()


def test_a_run_that_goes_on_appends_and_its_history_is_that_of_one_run(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(tmp_path, max_steps=6, **options).train()
    first = (tmp_path / RUN_LOG).read_bytes()
    make_trainer(tmp_path, max_steps=8, **options).train(str(tmp_path / "checkpoint-4"))
    assert (tmp_path / RUN_LOG).read_bytes().startswith(first)
    history = RunHistory(tmp_path)
    history.update()
    shown = history.snapshot()
    assert shown["series"]["loss"]["x"].tolist() == list(range(1, 9))
    assert (shown["step"], shown["ended"]) == (8, "finished")


def test_a_run_leaves_an_overview_of_its_log_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(run_watch, "_LINES_BETWEEN_OVERVIEWS", 3)
    trainer = make_trainer(tmp_path, max_steps=7)
    monkeypatch.setattr(trainer.run_log, "on_train_end", lambda *args, **kwargs: None)
    trainer.train()
    history = RunHistory(tmp_path)
    history.update(0)
    assert (history.step, history.snapshot()["series"]["loss"]["x"].tolist()) == (6, [1, 2, 3, 4, 5, 6])
    history.update()
    assert history.step == 7


def test_an_evaluation_alone_leaves_no_log(tmp_path):
    make_trainer(tmp_path, eval_dataset=make_dataset(4, seed=2)).evaluate()
    assert not (tmp_path / RUN_LOG).exists()


def test_an_alert_is_a_warning_a_line_of_the_log_and_is_over_in_the_log(tmp_path, caplog, monkeypatch):
    trainer = make_trainer(tmp_path, max_steps=5)
    log = trainer.log

    def log_with_a_bad_second_step(logs, *args):
        log(logs, *args)
        if "loss" in logs and trainer.state.global_step == 2:
            trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, {"loss": float("nan")})

    monkeypatch.setattr(trainer, "log", log_with_a_bad_second_step)
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        trainer.train()
    assert caplog.text.count("The loss is nan") == 1 and "Likely cause" in caplog.text
    assert [(row["step"], row["name"]) for row in rows_of(tmp_path, "alert")] == [(2, "loss")]
    assert [(row["step"], row["name"]) for row in rows_of(tmp_path, "alert_over")] == [(3, "loss")]


def test_a_webhook_is_kept_out_of_what_is_saved_and_reported(tmp_path):
    url = "http://127.0.0.1:9/secret-token"
    trainer = make_trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=2, alert_webhook=url, alert_free_gib=1e9
    )
    trainer.train()
    trainer.save_model()
    assert trainer.args.alert_webhook == url
    assert "secret-token" not in str(trainer.args.to_dict()) + trainer.args.to_json_string()
    saved = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert saved.alert_webhook is None
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(b"secret-token" in path.read_bytes() for path in files)


@pytest.mark.parametrize("option, value", [("alert_webhook", "file:///etc/passwd"), ("alert_wait_share", -1.0)])
def test_an_unusable_alert_option_is_refused_by_name(option, value, tmp_path):
    with pytest.raises(ValueError, match=f"--{option}"):
        make_trainer(tmp_path, **{option: value})


# ---- Uploads ----


def test_an_upload_is_waiting_until_it_has_arrived_or_failed():
    told = []
    uploads = Uploads(lambda event, **fields: told.append((event, fields)))
    uploads.begin("checkpoint-1", "S3")
    uploads.begin("checkpoint-1", "the Hub")
    assert {(one.name, one.place) for one in uploads.waiting()} == {
        ("checkpoint-1", "S3"),
        ("checkpoint-1", "the Hub"),
    }
    assert all(one.seconds >= 0 for one in uploads.waiting())
    uploads.end("checkpoint-1", "S3")
    uploads.end("checkpoint-1", "the Hub", "no network")
    assert uploads.waiting() == []
    assert [event for event, _ in told] == ["upload", "upload", "uploaded", "upload_failed"]
    assert told[-1][1]["error"] == "no network"


# ---- Decoded samples ----


def test_tokens_of_a_reply_are_accepted_drafts_or_the_targets_own():
    # The first token, a block of three accepted and a bonus token, one rejected at once, one cut short by the end.
    tokens = [1, 2, 10, 11, 12, 13, 14, 15, 16, 17]
    lengths, drafts = [4, 1, 2], [[11, 12, 13], [99, 98, 97], [16, 17, 50]]
    assert mark_tokens(2, lengths, drafts, tokens) == [
        (10, "target"),
        (11, "accepted"),
        (12, "accepted"),
        (13, "accepted"),
        (14, "target"),
        (99, "rejected"),
        (15, "target"),
        (16, "accepted"),
        (17, "accepted"),
    ]


def test_a_sample_is_the_text_of_the_reply_and_its_rejected_drafts_beside_it():
    target = make_target("qwen3")
    prompt = torch.arange(6, 14)
    output = speculative_generate(target, make_drafter(target), prompt[None], max_new_tokens=12)
    sample = describe_sample(prompt, output, None)
    kept = "".join(text for text, mark in sample["pieces"] if mark != "rejected")
    assert kept.split() == [str(token) for token in output.sequences[0, 8:].tolist()]
    assert sample["prompt"].split() == [str(token) for token in prompt.tolist()]
    lengths = output.acceptance_lengths[0]
    assert sample["acceptance_length"] == sum(lengths) / len(lengths)


def test_with_a_tokenizer_a_sample_is_text():
    tokenizer = make_tokenizer()
    target = make_target("qwen3", vocab_size=len(tokenizer))
    prompt = tokenizer("The answer is", return_tensors="pt").input_ids[0]
    output = speculative_generate(target, make_drafter(target), prompt[None], max_new_tokens=4)
    assert describe_sample(prompt, output, tokenizer)["prompt"] == "The answer is"


# ---- trackio ----


def test_trackio_is_given_every_figure_under_a_stable_name_and_publishes_nothing(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio")
    told = {"logs": []}

    class Config(dict):
        def update(self, values, allow_val_change=False):
            super().update(values)

    monkeypatch.setattr(trackio, "init", lambda **options: told.update(options))
    monkeypatch.setattr(trackio, "config", Config())
    monkeypatch.setattr(trackio, "log", told["logs"].append)
    monkeypatch.setattr(trackio, "finish", lambda: None)
    url = "http://127.0.0.1:9/secret-token"
    trainer = make_trainer(tmp_path / "my-drafter", report_to="trackio", max_steps=3, alert_webhook=url, **held_out())
    trainer.train()
    assert (told["project"], told["name"], told["resume"]) == ("hf_dflash", "my-drafter", "allow")
    assert told["space_id"] is None and trainer.args.trackio_static_space_id is False
    names = set().union(*told["logs"])
    assert {"train/loss", "train/time/step", "eval/acceptance_length", "eval/accuracy_slot_1"} <= names
    assert "secret-token" not in str(trackio.config)
