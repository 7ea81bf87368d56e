# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_drafters import make_drafter
from tiny_models import make_target

from hf_dflash.hub.layouts import export_drafter, import_drafter
from hf_dflash.hub.target_copies import check_target_copies


pytestmark = pytest.mark.compat


@pytest.fixture(params=["one file", "shards", "tied"])
def folders(request, tmp_path):
    target = make_target("qwen3", tie_word_embeddings=request.param == "tied")
    target.save_pretrained(tmp_path / "target", max_shard_size="10KB" if request.param == "shards" else "5GB")
    drafter = make_drafter(target)
    export_drafter(drafter, tmp_path / "drafter", target=str(tmp_path / "target"))
    return target, drafter.config.mask_token_id, tmp_path


def add(folder, tensors):
    own = load_file(folder / "model.safetensors")
    save_file({**own, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def test_copies_of_the_targets_embedding_and_head_are_left_out_in_any_precision(folders):
    target, _, folder = folders
    embedding, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    add(folder / "drafter", {"embed_tokens.weight": embedding.bfloat16(), "verifier_lm_head.weight": head.clone()})
    import_drafter(folder / "drafter", folder / "native", target=str(folder / "target"))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("is_mask_row", [True, False])
def test_an_embedding_or_head_that_was_trained_is_not_dropped_without_a_word(folders, name, is_mask_row):
    target, mask_token_id, folder = folders
    layer = target.get_input_embeddings() if name.startswith("embed") else target.get_output_embeddings()
    trained = layer.weight.detach().clone()
    trained[mask_token_id if is_mask_row else slice(None)] += torch.randn(trained.shape[1])
    add(folder / "drafter", {name: trained})
    with pytest.raises(ValueError, match=f"`{name}` is not a copy of the target's"):
        import_drafter(folder / "drafter", folder / "native", target=str(folder / "target"))
    assert not (folder / "native").exists()


@pytest.mark.parametrize("quantized", ["lm_head.qweight", "lm_head.weight"])
def test_a_quantized_head_of_the_target_is_not_taken_for_another_one(tmp_path, quantized):
    head = torch.randn(16, 8)
    tensors = {"model.embed_tokens.weight": torch.randn(16, 8), quantized: head.to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_target_copies({"lm_head.weight": head}, tmp_path, 0, "drafter")
