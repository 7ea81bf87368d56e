# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How to put recurrent states back after a rejected draft: three ways, one run.

- replay the mixers (what `RollbackCache` does): copy the states before the block, run the recurrent mixers alone again on
  the accepted tokens;
- replay the target: the same copy, but a whole pass of the target over the accepted tokens;
- per-step states: the mixers read the block token by token and keep the states after each, so that nothing runs again.

    python benchmarks/recurrent_rollback.py [--device cuda --dtype bfloat16 --hidden-size 2048 --layers 32]

The target is random: its sizes decide, not its weights. Prints the milliseconds of one block (verify pass and roll-back).
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_dflash.decoding.target_cache import RollbackCache


def make_target(hidden_size: int, num_layers: int, vocab_size: int) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(1, hidden_size // 64),
        num_key_value_heads=max(1, hidden_size // 256),
        head_dim=64,
        linear_num_key_heads=max(1, hidden_size // 128),
        linear_num_value_heads=max(1, hidden_size // 64),
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return Qwen3_5ForCausalLM(config).eval()


class MixerReplay:
    """What the package does."""

    def __init__(self, target, prompt):
        self.target = target
        self.cache = RollbackCache(DynamicCache(config=target.config), [prompt.shape[1]], target).__enter__()
        target(input_ids=prompt, past_key_values=self.cache.cache, use_cache=True, logits_to_keep=1)

    def block(self, block, kept):
        self.cache.snapshot()
        logits = self.target(input_ids=block, past_key_values=self.cache.cache, use_cache=True).logits
        self.cache.keep(block.shape[1], [kept])
        return logits

    def close(self):
        self.cache.__exit__()


class TargetReplay(MixerReplay):
    def block(self, block, kept):
        self.cache.snapshot()
        states = self.cache._snapshot
        logits = self.target(input_ids=block, past_key_values=self.cache.cache, use_cache=True).logits
        for layer in self.cache.attention_layers:
            layer.crop(-block.shape[1])
        for index, layer in self.cache.recurrent_layers.items():
            layer.conv_states, layer.recurrent_states = states[index]
        self.target(input_ids=block[:, :kept], past_key_values=self.cache.cache, use_cache=True, logits_to_keep=1)
        return logits


class PerStepStates(MixerReplay):
    def __init__(self, target, prompt):
        super().__init__(target, prompt)
        self.steps = {index: [] for index in self.cache.recurrent_layers}
        self.forwards = {index: mixer.forward for index, mixer in self.cache._mixers.items()}
        for index, mixer in self.cache._mixers.items():
            mixer.forward = self.step_by_step(index)

    def step_by_step(self, index):
        forward, layer, steps = self.forwards[index], self.cache.recurrent_layers[index], self.steps[index]

        def run(hidden_states, *args, **kwargs):
            outputs = []
            for position in range(hidden_states.shape[1]):
                outputs.append(forward(hidden_states[:, position : position + 1], *args, **kwargs))
                steps.append((layer.conv_states[0].clone(), layer.recurrent_states[0].clone()))
            return torch.cat(outputs, dim=1)

        return run

    def block(self, block, kept):
        for steps in self.steps.values():
            steps.clear()
        logits = self.target(input_ids=block, past_key_values=self.cache.cache, use_cache=True).logits
        for layer in self.cache.attention_layers:
            layer.crop(-(block.shape[1] - kept))
        for index, layer in self.cache.recurrent_layers.items():
            layer.conv_states[0], layer.recurrent_states[0] = self.steps[index][kept - 1]
        return logits

    def close(self):
        super().close()
        for index, mixer in self.cache._mixers.items():
            mixer.forward = self.forwards[index]


WAYS = {"replay the mixers": MixerReplay, "replay the target": TargetReplay, "per-step states": PerStepStates}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--kept", type=int, default=4, help="tokens accepted of each block, the anchor included")
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    target = make_target(args.hidden_size, args.layers, args.vocab_size).to(args.device, getattr(torch, args.dtype))
    prompt = torch.randint(0, args.vocab_size, (1, 128), device=args.device)
    rows = []
    for block_size in args.block_size:
        blocks = [
            torch.randint(0, args.vocab_size, (1, block_size), device=args.device) for _ in range(args.blocks + 3)
        ]
        logits = {}
        for name, way in WAYS.items():
            run = way(target, prompt)
            times = []
            for block in blocks:
                if args.device != "cpu":
                    torch.accelerator.synchronize()
                start = time.perf_counter()
                out = run.block(block, min(args.kept, block_size))
                if args.device != "cpu":
                    torch.accelerator.synchronize()
                times.append(time.perf_counter() - start)
            run.close()
            logits[name] = out.float()
            # The first blocks initialise what is initialised lazily.
            milliseconds = 1000 * sorted(times[3:])[len(times[3:]) // 2]
            rows.append({"block_size": block_size, "way": name, "milliseconds": milliseconds})
        reference = logits["replay the mixers"]
        for name, other in logits.items():
            print(f"block {block_size}: |{name} - ours| <= {(other - reference).abs().max():.1e}")
    for row in rows:
        ours = next(r for r in rows if r["block_size"] == row["block_size"])
        row["ratio_to_ours"] = row["milliseconds"] / ours["milliseconds"]
        print(
            f"block {row['block_size']:3d}  {row['way']:20s} {row['milliseconds']:8.2f} ms  x{row['ratio_to_ours']:.2f}"
        )
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        args.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
