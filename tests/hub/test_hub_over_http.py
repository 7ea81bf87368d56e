# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Pushes and downloads through the real `huggingface_hub` client, over HTTP, to and from a server on loopback."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import HubServer, Repository
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors.torch import load, load_file
from tiny_drafters import make_drafter
from tiny_models import make_target

from hf_dflash import cli
from hf_dflash.hub import publishing
from hf_dflash.hub.commits import commit_folder
from hf_dflash.hub.drafter_files import open_folder
from hf_dflash.hub.publishing import push_to_hub
from hf_dflash.training.checkpoint import is_whole


pytestmark = pytest.mark.compat

TESTS = Path(__file__).parents[1]
TOKEN = "hf_aliceAliceAliceAliceAliceAlice"
NATIVE_FILES = {
    ".gitattributes",
    "README.md",
    "config.json",
    "model.safetensors",
    "compilation.py",
    "configuration_dflash.py",
    "modeling_dflash.py",
    "training_curves.png",
}

WITHOUT_PACKAGE = """
import sys

# The package may be installed in this environment: such an entry makes every import of it fail.
sys.modules["hf_dflash"] = None
import contextlib, hashlib, io, re
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModel, AutoModelForCausalLM

seen, middle = {}, sys.argv[1]
for name, revision in (("main", None), ("middle", middle), ("serving", "serving")):
    folder = Path(snapshot_download("alice/every_save", revision=revision))
    files = [path for path in folder.rglob("*") if path.is_file()]
    seen["files", name] = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    loaded = AutoModel.from_pretrained("alice/every_save", revision=revision, trust_remote_code=True)
    seen[name] = type(loaded).__name__, type(loaded).__module__, dict(loaded.state_dict())
    card = (folder / "README.md").read_text()
    seen["code", name] = re.findall(r"```python\\n(.*?)\\n```", card, re.DOTALL)
try:
    AutoModel.from_pretrained("alice/every_save")
except Exception as error:
    seen["without the flag"] = repr(error)

# The cards' own code; the native form's second piece follows the first one, which loads the target.
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    names = {}
    exec(seen["code", "serving"][0].replace("512", "16"), names)
exec(seen["code", "main"][1].replace("512", "16"), names)
plain = names["target"].generate(**names["inputs"], max_new_tokens=16, do_sample=False)
seen["greedy"] = names["tokenizer"].decode(plain[0]), printed.getvalue(), names["tokenizer"].decode(names["output"][0])
torch.save(seen, "seen_without_package.pt")
"""


def run_python(arguments: list[str], folder: Path, hub: HubServer, with_package: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / f"home_{with_package}"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}" if with_package else "",
    }
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    (folder / f"stderr_{with_package}").write_text(result.stderr)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def hub(folder):
    """A Hub to which `publishing_runs.py` has published."""
    hub = HubServer({TOKEN: "alice", "hf_bob": "bob"})
    hub.overloaded.add("alice/overloaded")
    with hub.running():
        run_python([str(TESTS / "hub" / "publishing_runs.py"), str(folder)], folder, hub, with_package=True)
        yield hub


@pytest.fixture(scope="module")
def seen(hub, folder):
    return torch.load(folder / "seen.pt", weights_only=False)


@pytest.fixture(scope="module")
def seen_without_package(hub, folder):
    middle = commits(hub, "every_save", "Training in progress, step 2")[0].oid
    run_python(["-c", WITHOUT_PACKAGE, middle], folder, hub, with_package=False)
    return torch.load(folder / "seen_without_package.pt", weights_only=False)


def commits(hub, name: str, message: str) -> list:
    """Commits of a repository: that of the native form comes first."""
    return [commit for commit in hub.repositories[f"alice/{name}"].history if commit.message == message]


def is_custom_generate(name: str) -> bool:
    return name.startswith("custom_generate/") and name.endswith(".py")


# ---- What is pushed ----


@pytest.mark.parametrize(
    "message", ["Training in progress, step 2", "Training in progress, step 4", "End of training"]
)
def test_every_push_is_a_drafter_in_both_forms_and_nothing_else(message, hub):
    native, serving = commits(hub, "every_save", message)
    assert {name for name in native.files if not is_custom_generate(name)} == NATIVE_FILES
    assert json.loads(native.files["config.json"].data)["model_type"] == "dflash"
    assert json.loads(serving.files["config.json"].data)["model_type"] == "qwen3"
    assert "dflash.py" in serving.files and "configuration_dflash.py" in serving.files
    for form in (native, serving):
        assert {"custom_generate/generate.py", "custom_generate/speculative.py"} <= form.files.keys()
        assert form.files["model.safetensors"].is_large
        weights = load(form.files["model.safetensors"].data)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert not [name for name in weights if "embed" in name or "lm_head" in name], "nothing of the target"


def test_pushes_in_mid_run_hold_the_weights_of_their_checkpoint(hub, folder):
    for step in (2, 4):
        saved = load_file(folder / "every_save" / f"checkpoint-{step}" / "model.safetensors")
        for form in commits(hub, "every_save", f"Training in progress, step {step}"):
            pushed = load(form.files["model.safetensors"].data)
            assert pushed.keys() == saved.keys()
            assert all(torch.equal(pushed[name], tensor.to(torch.bfloat16)) for name, tensor in saved.items())
    first, last = (commits(hub, "every_save", f"Training in progress, step {step}")[0] for step in (2, 4))
    assert first.files["model.safetensors"].sha256 != last.files["model.safetensors"].sha256


def test_the_final_push_is_what_was_saved_and_what_the_call_returned(hub, seen, folder):
    files = hub.files("alice/every_save")
    native = commits(hub, "every_save", "End of training")[0]
    assert native.oid == seen["commit"]
    for name in ("model.safetensors", "modeling_dflash.py", "configuration_dflash.py", "training_curves.png"):
        local = (folder / "every_save" / name).read_bytes()
        assert files[name].sha256 == hashlib.sha256(local).hexdigest(), name


def test_checkpoints_are_pushed_whole_where_the_strategy_wants_them(hub, tmp_path):
    for strategy, folders in (
        ("every_save", []),
        ("checkpoint", ["last-checkpoint"]),
        ("all_checkpoints", ["checkpoint-2", "checkpoint-4"]),
    ):
        files = hub.files(f"alice/{strategy}")
        assert sorted({name.split("/")[0] for name in files if "checkpoint" in name.split("/")[0]}) == folders
        for name, content in files.items():
            path = tmp_path / strategy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.data)
        for checkpoint in folders:
            assert is_whole(tmp_path / strategy / checkpoint)
            weights = load_file(tmp_path / strategy / checkpoint / "model.safetensors")
            assert {tensor.dtype for tensor in weights.values()} == {torch.float32}, "a run can go on from it"
            assert (tmp_path / strategy / checkpoint / "custom_generate" / "generate.py").is_file()
        assert not any("checkpoint" in name for name in hub.files(f"alice/{strategy}", "serving"))
    state = json.loads((tmp_path / "checkpoint" / "last-checkpoint" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    # Nothing before the end, then both forms.
    messages = [commit.message for commit in hub.repositories["alice/end"].history]
    assert messages == ["initial commit", "Model save", "Model save"]


def test_an_adapter_is_published_as_the_drafter_that_it_makes(hub, seen):
    for message in ("Training in progress, step 4", "End of training"):
        for form in commits(hub, "adapter", message):
            assert not [name for name in form.files if "adapter" in name]
            weights = load(form.files["model.safetensors"].data)
            assert weights.keys() == seen["adapter"].keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in seen["adapter"].items())


def test_nothing_that_is_published_names_a_folder_of_this_machine(hub, folder):
    for commit in hub.repositories["alice/every_save"].history:
        assert not [name for name, content in commit.files.items() if str(folder).encode() in content.data]


def test_no_file_holds_the_token(hub):
    contents = [
        c for repository in hub.repositories.values() for commit in repository.history for c in commit.files.values()
    ]
    assert len(contents) > 100
    assert not any(TOKEN.encode() in content.data for content in contents)


def test_a_hub_that_refuses_stops_no_training_but_a_push_that_was_asked_for(hub, seen, folder):
    assert seen["steps without a Hub"] == 4
    assert "503" in seen["push without a Hub"]
    assert "training goes on" in (folder / "stderr_True").read_text()
    assert (folder / "overloaded" / "checkpoint-4").is_dir()
    assert not list((folder / "overloaded" / ".hub_uploads").glob("*")), "what waited for its upload is gone"


def test_a_stopped_run_saves_and_does_not_start_a_push(hub, seen, folder):
    assert seen["stopped"] == 128 + 15
    assert is_whole(folder / "stopped" / "checkpoint-1")
    assert [commit.message for commit in hub.repositories["alice/stopped"].history] == ["initial commit"]


def test_a_target_that_only_this_machine_knows_is_refused_before_training(seen):
    assert "--target_hub_id" in seen["unnamed"]


# ---- The card ----


def test_the_card_names_target_data_figures_and_this_very_repository(hub, seen):
    card = ModelCard(hub.files("alice/every_save")["README.md"].data.decode())
    assert card.data.base_model == "alice/target"
    assert card.data.license == "mit"
    assert card.data.datasets == ["alice/completions"]
    assert {"dflash", "hf_dflash", "speculative-decoding"} <= set(card.data.tags)
    evaluation = [entry for entry in seen["log"] if "eval_acceptance_length" in entry][-1]
    decoded = [entry for entry in seen["log"] if "decoded_acceptance_length" in entry][-1]
    for words in (
        "| learning_rate | 0.01 |",
        "| loss_gamma | 4.0 |",
        "23 samples with",
        "4 steps.",
        f"| held-out replies | {evaluation['eval_acceptance_length']:.2f} | simulated at step 4",
        f"{evaluation['eval_target_agreement']:.1%} of those are the target's greedy choice",
        f"| {decoded['decoded_acceptance_length']:.2f} | really decoded at step 4",
        "](training_curves.png)",
        "vllm serve alice/target",
        '"model": "alice/every_save", "num_speculative_tokens": 3, "revision": "serving"',
        "--speculative-draft-model-path alice/every_save --speculative-draft-model-revision serving",
        "Weights: `mit`.",
        "@article{chen2026dflash",
    ):
        assert words in card.content, words
    assert hub.files("alice/every_save")["training_curves.png"].data.startswith(b"\x89PNG")


def test_a_card_in_mid_run_says_how_far_training_has_come(hub):
    native, serving = commits(hub, "every_save", "Training in progress, step 2")
    for form in (native, serving):
        card = form.files["README.md"].data.decode()
        assert "Under way: step 2 of 4." in card
        assert "simulated at step 2" in card


def test_a_push_beside_main_leaves_main_alone_and_its_card_names_the_branch(hub):
    repository = hub.repositories["alice/by_hand"]
    assert repository.branches.keys() == {"main", "v2", "v2-serving"}
    assert repository.branches["main"].files.keys() == {".gitattributes"}
    assert (
        'from_pretrained("alice/by_hand", revision="v2"' in repository.branches["v2"].files["README.md"].data.decode()
    )
    served = repository.branches["v2-serving"].files
    assert "--speculative-draft-model-revision v2-serving" in served["README.md"].data.decode()
    assert "Weights: `mit`." in served["README.md"].data.decode(), "the record of the folder's own card"
    assert served["model.safetensors"].sha256 == hub.files("alice/every_save", "serving")["model.safetensors"].sha256


# ---- What is downloaded ----


@pytest.mark.parametrize("revision", ["main", "middle", "serving"])
def test_downloads_without_the_package_are_what_was_uploaded_and_load(revision, hub, seen_without_package):
    commit = {
        "main": hub.repositories["alice/every_save"].branches["main"],
        "middle": commits(hub, "every_save", "Training in progress, step 2")[0],
        "serving": hub.repositories["alice/every_save"].branches["serving"],
    }[revision]
    downloaded = seen_without_package["files", revision]
    assert downloaded == {name: content.sha256 for name, content in commit.files.items()}
    name, module, weights = seen_without_package[revision]
    assert name == ("DFlashDraftModel" if revision == "serving" else "DFlashForSpeculation")
    assert module.startswith("transformers_modules.")
    uploaded = load(commit.files["model.safetensors"].data)
    assert weights.keys() == uploaded.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in uploaded.items())


def test_without_package_and_flag_the_download_is_refused(seen_without_package):
    assert "trust_remote_code" in seen_without_package["without the flag"]


def test_with_the_package_no_flag_is_needed(hub, seen):
    module, weights = seen["with the package"]
    assert module == "hf_dflash.drafter.modeling_dflash"
    uploaded = load(hub.files("alice/every_save")["model.safetensors"].data)
    assert all(torch.equal(weights[name], tensor) for name, tensor in uploaded.items())


def test_the_code_on_the_cards_decodes_as_the_target_does(seen, seen_without_package):
    greedy, serving, custom_generate = seen_without_package["greedy"]
    assert serving.rstrip("\n") == greedy
    assert custom_generate == greedy
    assert seen["printed with the package"].rstrip("\n") == greedy


# ---- What the server refuses, as the real one does ----


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)


def status_of(function, *arguments, **options) -> int:
    with pytest.raises(HfHubHTTPError) as refusal:
        function(*arguments, **options)
    return refusal.value.response.status_code


def test_no_token_and_a_wrong_one_are_refused(online, hub):
    addition = [CommitOperationAdd("notes.txt", b"mine")]
    for token, status in ((False, 401), ("hf_nobody", 401), ("hf_bob", 403)):
        api = HfApi(endpoint=hub.url, token=token)
        assert status_of(api.create_commit, "alice/checkpoint", addition, commit_message="Mine") == status
    assert status_of(HfApi(endpoint=hub.url, token=False).create_repo, "drafter") == 401
    assert status_of(HfApi(endpoint=hub.url, token="hf_bob").create_repo, "alice/drafter") == 403
    assert status_of(HfApi(endpoint=hub.url, token="hf_nobody").whoami) == 401
    assert "notes.txt" not in hub.files("alice/checkpoint")
    # Private: for strangers there is no such repository.
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token="hf_bob").model_info("alice/every_save")


def test_unknown_repositories_and_revisions_are_refused(online, hub):
    api = HfApi(endpoint=hub.url, token=TOKEN)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("alice/nothing")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("alice/checkpoint", revision="nothing")


def test_a_commit_on_a_parent_that_is_not_the_newest_is_refused(online, hub):
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("alice/contested")
    old = api.model_info("alice/contested").sha
    for name in ("first", "second"):
        options = {"commit_message": name, "parent_commit": old}
        addition = [CommitOperationAdd(f"{name}.txt", name.encode())]
        if name == "first":
            assert api.create_commit("alice/contested", addition, **options).oid != old
        else:
            assert status_of(api.create_commit, "alice/contested", addition, **options) == 412
    assert api.list_repo_files("alice/contested") == [".gitattributes", "first.txt"]


def test_a_folder_replaces_what_was_there_in_one_commit_and_touches_nothing_else(online, hub, tmp_path):
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("alice/folders")
    for name in ("old.txt", "sub/kept.txt"):
        (tmp_path / "first" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "first" / name).write_text(name)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "new.txt").write_text("new")
    commit_folder(api, "alice/folders", tmp_path / "first", "first")
    commit_folder(api, "alice/folders", tmp_path / "first", "first, below", path_in_repo="below")
    commit_folder(api, "alice/folders", tmp_path / "second", "second", path_in_repo="below", remove_others=True)
    assert hub.files("alice/folders").keys() == {".gitattributes", "old.txt", "sub/kept.txt", "below/new.txt"}
    commit_folder(api, "alice/folders", tmp_path / "second", "third", remove_others=True)
    assert hub.files("alice/folders").keys() == {".gitattributes", "new.txt"}
    messages = [commit.message for commit in hub.repositories["alice/folders"].history]
    assert messages == ["initial commit", "first", "first, below", "second", "third"]


# ---- By hand ----


@pytest.fixture
def drafter(online, hub, tmp_path, monkeypatch):
    """What `push_to_hub` takes, in this process."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    target = make_target("qwen3")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    return {
        "folder": tmp_path / "drafter",
        "target": target.config,
        "target_name": "alice/target",
        "token": TOKEN,
    }


@pytest.mark.parametrize("revisions", [{"revision": "serving"}, {"serving_revision": "main"}])
def test_one_form_does_not_replace_the_other(revisions, drafter, hub):
    with pytest.raises(ValueError, match="one would replace the other"):
        push_to_hub(repo_id="alice/one_revision", **drafter, **revisions)
    assert "alice/one_revision" not in hub.repositories


def test_an_adapter_that_was_published_before_is_not_loaded_in_the_drafters_place(drafter, hub):
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("alice/was_adapter")
    additions = [
        CommitOperationAdd(n, b"{}") for n in ("adapter_config.json", "adapter_model.safetensors", "mine.txt")
    ]
    api.create_commit("alice/was_adapter", additions, commit_message="An adapter")
    push_to_hub(repo_id="alice/was_adapter", **drafter)
    assert not [name for name in hub.files("alice/was_adapter") if "adapter" in name]
    assert "mine.txt" in hub.files("alice/was_adapter")


def test_of_a_repository_with_checkpoints_the_drafter_alone_is_downloaded(drafter, hub, tmp_path, monkeypatch):
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("alice/with_checkpoints")
    commit_folder(api, "alice/with_checkpoints", drafter["folder"], "A drafter")
    (drafter["folder"] / "optimizer.pt").touch()
    commit_folder(api, "alice/with_checkpoints", drafter["folder"], "Its checkpoint", path_in_repo="last-checkpoint")
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = open_folder("alice/with_checkpoints")
    assert "model.safetensors" in os.listdir(folder) and "last-checkpoint" not in os.listdir(folder)


@pytest.mark.parametrize("revision", ["main", "serving"])
def test_a_published_drafter_in_the_targets_place_is_refused_before_anything_loads(
    revision, drafter, hub, tmp_path, monkeypatch, capsys
):
    # Of a serving form, transformers would make a Qwen3 of random weights.
    copied = hub.repositories["alice/as_target"] = Repository("alice")
    copied.commit("main", "a copy", hub.files("alice/every_save", revision))
    address = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert cli.main(["check", "dataset", "--target-model", "alice/as_target"]) == 2
    assert "--target-model alice/as_target is a DFlash drafter: give the model" in capsys.readouterr().err


def test_a_short_name_is_that_of_ones_own_repository(drafter, hub):
    push_to_hub(repo_id="short", **drafter)
    assert "alice/short" in hub.files("alice/short")["README.md"].data.decode()


def test_a_wrong_name_is_refused_before_anything_is_made(drafter, hub):
    before = set(hub.repositories)
    for name in ("alice/a b", "alice/x/y", "bob/drafter"):
        with pytest.raises((ValueError, HfHubHTTPError)):
            push_to_hub(repo_id=name, **drafter)
    assert set(hub.repositories) == before


def test_a_push_that_was_cut_between_its_forms_is_made_whole_by_the_next_one(drafter, hub, monkeypatch):
    commit_whole, calls = publishing.commit_folder, []

    def cut(*arguments, **options):
        calls.append(options)
        if len(calls) == 2:
            raise ConnectionError("cut")
        return commit_whole(*arguments, **options)

    monkeypatch.setattr(publishing, "commit_folder", cut)
    with pytest.raises(ConnectionError):
        push_to_hub(repo_id="alice/cut", **drafter)
    push_to_hub(repo_id="alice/cut", **drafter)
    kinds = {r: json.loads(hub.files("alice/cut", r)["config.json"].data)["model_type"] for r in ("main", "serving")}
    assert kinds == {"main": "dflash", "serving": "qwen3"}
