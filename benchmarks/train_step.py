# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""One drafter step (forward and backward, no optimizer) at the shapes of Qwen3.6-27B: ours against speculators 0.9.0.

    python benchmarks/train_step.py --output benchmarks/results/train_step.json      # one GPU of 80 GB or more
    python benchmarks/train_step.py --tiny                                            # any CPU, seconds

Both sides get the same shapes on the same device in one run: one document of 4,096 supervised tokens, 512 anchors x 16
slots, bf16 parameters and gradients, random weights and features. Decoder layers are compiled one by one on both sides (a
whole-model compile did not finish in five minutes there, nor did the peer's own compiled mask: its mask is built
uncompiled, and its time is reported apart). The peer's step includes the target's logits at every slot, which it makes
inside the step; ours takes label ids, which the frozen target makes where it lives.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers

from hf_dflash.drafter.blocks import create_flex_mask
from hf_dflash.drafter.configuration_dflash import DFlashConfig
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.drafter.modeling_dflash import DFlashForSpeculation, create_training_masks
from hf_dflash.target.language_head import LanguageHead


QWEN36 = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "target_layer_ids": [1, 16, 31, 46, 61],
    "num_target_layers": 64,
    "mask_token_id": 248070,
    "block_size": 16,
}
TINY = {
    **QWEN36,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "mask_token_id": 500,
}


class Inputs:
    def __init__(self, config: DFlashConfig, context_length: int, num_anchors: int, device, dtype):
        torch.manual_seed(0)
        where = {"device": device, "dtype": dtype}
        self.context_length, self.num_anchors, self.block_size = context_length, num_anchors, config.block_size
        self.features = torch.randn(1, context_length, len(config.target_layer_ids) * config.hidden_size, **where)
        self.last_hidden_states = torch.randn(1, context_length, config.hidden_size, **where)
        self.embedding = torch.randn(config.vocab_size, config.hidden_size, **where) * 0.02
        self.head_weight = torch.randn(config.vocab_size, config.hidden_size, **where) * 0.02
        self.input_ids = torch.randint(0, config.mask_token_id, (1, context_length), device=device)
        self.document_ids = torch.zeros(1, context_length, dtype=torch.long, device=device)
        last = context_length - config.block_size - 1
        self.anchors = torch.randperm(last, device=device)[:num_anchors].sort().values
        self.labels = torch.randint(0, config.vocab_size, (num_anchors, config.block_size - 1), device=device)


class Ours:
    name = "hf_dflash"

    def __init__(self, config: DFlashConfig, inputs: Inputs, device, dtype, compile_layers: bool):
        self.inputs = inputs
        self.model = DFlashForSpeculation(config).to(device, dtype).train()
        if compile_layers:
            for layer in self.model.layers:
                layer.compile()
        self.head = LanguageHead(inputs.head_weight)
        slots = torch.full((inputs.num_anchors, config.block_size), config.mask_token_id, device=device)
        slots[:, 0] = inputs.input_ids[0, inputs.anchors]
        self.slot_ids = slots.view(1, -1)
        offsets = torch.arange(config.block_size, device=device)
        context_positions = torch.arange(inputs.context_length, device=device)
        self.position_ids = torch.cat([context_positions, (inputs.anchors[:, None] + offsets).flatten()])[None]
        self.supervised = torch.ones_like(inputs.labels, dtype=torch.bool)
        self.slot_indices = torch.arange(inputs.labels.numel(), device=device)

    def make_mask(self):
        inputs = self.inputs
        valid = torch.ones_like(inputs.anchors, dtype=torch.bool)
        return create_training_masks(
            self.model,
            lambda **kinds: create_flex_mask(
                inputs.document_ids[0], inputs.anchors, valid, inputs.block_size, **kinds
            ),
        )

    def forward(self, mask):
        noise = torch.nn.functional.embedding(self.slot_ids, self.inputs.embedding)
        states = self.model(noise, self.inputs.features, self.position_ids, attention_mask=mask).last_hidden_state
        return states.view(self.inputs.num_anchors, self.inputs.block_size, -1)[:, 1:]

    def loss(self, states):
        return compute_dflash_loss(
            states, self.head, self.inputs.labels, self.supervised, gamma=7.0, slot_indices=self.slot_indices
        )[0]


class Speculators:
    name = "speculators 0.9.0"

    def __init__(self, config: DFlashConfig, inputs: Inputs, device, dtype, compile_layers: bool):
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.models.dflash.config import DFlashSpeculatorConfig
        from speculators.models.dflash.metrics import compute_metrics
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from torch.nn.attention.flex_attention import create_block_mask
        from transformers import Qwen3Config

        shared = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
        layers = Qwen3Config(**{name: getattr(config, name) for name in shared.split()})
        layers._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
        peer_config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=config.vocab_size,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            aux_hidden_state_layer_ids=[i + 1 for i in config.target_layer_ids],
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.block_size - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        self.inputs, self.compute_metrics = inputs, compute_metrics
        self.loss_config = resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")
        with torch.device(device):
            self.model = core.DFlashDraftModel(peer_config).to(dtype).train()
        self.model.load_state_dict(
            {
                "embed_tokens.weight": inputs.embedding,
                "lm_head.weight": inputs.head_weight,
                "verifier_lm_head.weight": inputs.head_weight,
                "verifier_norm.weight": torch.ones(config.hidden_size),
            },
            strict=False,
        )
        if compile_layers:
            self.model._create_mask_fn = create_block_mask
            for layer in self.model.layers:
                layer.compile()
        valid = torch.ones_like(inputs.anchors, dtype=torch.bool)
        core.select_anchors = lambda *args, **kwargs: (inputs.anchors, valid)
        self.loss_mask = torch.ones_like(inputs.input_ids)
        self._build_mask = self.model._build_attention_mask

    def make_mask(self):
        return self._build_mask(
            self.loss_mask, self.inputs.num_anchors, self.inputs.document_ids, self.loss_mask.device
        )

    def forward(self, mask):
        self.model._build_attention_mask = lambda *args: mask
        return self.model._backbone_forward(
            self.inputs.features,
            self.inputs.input_ids,
            self.loss_mask,
            self.inputs.last_hidden_states,
            self.inputs.document_ids,
            max_anchors=self.inputs.num_anchors,
        )

    def loss(self, outputs):
        _, logits, targets, aligned, _ = outputs
        return self.compute_metrics(
            logits, targets, aligned, self.inputs.block_size, gamma=7.0, loss_config=self.loss_config
        )[0]


def measure(side, repeats: int, device) -> dict:
    """Milliseconds of each part, medians over `repeats`, and the peak memory of a step."""

    def synchronize():
        if device.type == "cuda":
            torch.cuda.synchronize()

    parts = {"mask": [], "forward": [], "loss": [], "backward": [], "step": []}
    synchronize()
    start = time.perf_counter()
    for repeat in range(repeats + 3):
        if repeat == 3:
            warm_up = time.perf_counter() - start
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        times = [time.perf_counter()]
        value = None
        for part in (side.make_mask, side.forward, side.loss, torch.Tensor.backward):
            value = part() if value is None else part(value)
            synchronize()
            times.append(time.perf_counter())
        side.model.zero_grad(set_to_none=True)
        if repeat >= 3:
            for name, begin, end in zip(parts, times, times[1:], strict=False):
                parts[name].append((end - begin) * 1e3)
            parts["step"].append((times[-1] - times[0]) * 1e3)
    result = {f"{name}_ms": sorted(values)[len(values) // 2] for name, values in parts.items()}
    result["warm_up_s"] = warm_up
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
    config = DFlashConfig(**(TINY if args.tiny else QWEN36))
    if args.tiny:
        args.context, args.anchors, args.repeats = 256, 8, 2
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = Inputs(config, args.context, args.anchors, device, dtype)

    results = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "context": args.context,
        "anchors": args.anchors,
        "block_size": config.block_size,
        "dtype": str(dtype),
    }
    for side_type in (Ours, Speculators):
        if side_type is Ours and device.type == "cpu":
            # Flex attention has no backward pass on a CPU.
            side_type = DenseOurs
        try:
            side = side_type(config, inputs, device, dtype, compile_layers=device.type == "cuda")
        except ImportError as error:
            print(f"{side_type.name}: not measured ({error})", file=sys.stderr)
            continue
        results[side_type.name] = measure(side, args.repeats, device)
        print(side_type.name, {k: round(v, 2) for k, v in results[side_type.name].items()}, flush=True)
        del side
        if device.type == "cuda":
            torch.cuda.empty_cache()
    ours, theirs = results[Ours.name], results.get(Speculators.name)
    if theirs:
        results["ratio"] = theirs["step_ms"] / ours["step_ms"]
        results["ratio_without_masks"] = (theirs["step_ms"] - theirs["mask_ms"]) / (ours["step_ms"] - ours["mask_ms"])
        print(f"speculators / hf_dflash: {results['ratio']:.2f} (without masks {results['ratio_without_masks']:.2f})")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n")
    return 0


class DenseOurs(Ours):
    def make_mask(self):
        from hf_dflash.drafter.blocks import create_anchor_block_mask_mod, create_dense_mask

        inputs = self.inputs
        valid = torch.ones_like(inputs.anchors, dtype=torch.bool)

        def create(**kinds):
            mask_mod, q_len, kv_len = create_anchor_block_mask_mod(
                inputs.document_ids, inputs.anchors, valid, inputs.block_size, **kinds
            )
            return create_dense_mask(mask_mod, 1, q_len, kv_len, inputs.anchors.device)

        return create_training_masks(self.model, create)


if __name__ == "__main__":
    sys.exit(main())
