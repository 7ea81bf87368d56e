# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""How to put recurrent states back after a rejected draft: four ways, one run.

- one pass (what `RollbackCache` does): the block is read by our own form of the gated delta rule, from which the state
  after any of its tokens can be made;
- replay the mixers: copy the states before the block, run the recurrent mixers alone again on the accepted tokens;
- replay the target: the same copy, but a whole pass of the target over the accepted tokens;
- per-step states: the mixers read the block token by token and keep the states after each, so that nothing runs again.

    python benchmarks/recurrent_rollback.py [--device cuda --dtype bfloat16 --hidden-size 2048 --layers 32]

The target is random: its sizes decide, not its weights. Prints the milliseconds of one block (verify pass and roll-back),
and of a pass over one token, in which the best way would make a block free of charge. All but the first run transformers'
own rules, on CUDA with whatever kernels are installed for them.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hf_dflash.decoding.target_cache import RollbackCache


ROUNDS = 3
WARM_UP = 3


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


def read_prompt(target, prompt) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    target(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


class OnePass:
    """What the package does."""

    def __init__(self, target, prompt):
        self.target = target
        self.cache = RollbackCache(read_prompt(target, prompt), [prompt.shape[1]], target)
        self.cache.record()

    def block(self, block, kept):
        logits = self.target(input_ids=block, past_key_values=self.cache.cache, use_cache=True).logits
        self.cache.keep(block.shape[1], [kept])
        return logits

    def close(self):
        self.cache.__exit__()


class TargetReplay:
    def __init__(self, target, prompt):
        self.target, self.cache = target, read_prompt(target, prompt)
        kinds = target.config.layer_types
        self.recurrent = {i: layer for i, layer in enumerate(self.cache.layers) if kinds[i] == "linear_attention"}
        self.attention = [layer for i, layer in enumerate(self.cache.layers) if i not in self.recurrent]
        self.mixers = {i: target.model.layers[i].linear_attn for i in self.recurrent}

    def block(self, block, kept):
        before = [
            (layer.conv_states[0].clone(), layer.recurrent_states[0].clone()) for layer in self.recurrent.values()
        ]
        logits = self.target(input_ids=block, past_key_values=self.cache, use_cache=True).logits
        for layer, states in zip(self.recurrent.values(), before, strict=True):
            layer.conv_states[0], layer.recurrent_states[0] = states
        self.replay(block, kept)
        return logits

    def replay(self, block, kept):
        for layer in self.attention:
            layer.crop(-block.shape[1])
        self.target(input_ids=block[:, :kept], past_key_values=self.cache, use_cache=True, logits_to_keep=1)

    def close(self):
        pass


class MixerReplay(TargetReplay):
    def __init__(self, target, prompt):
        super().__init__(target, prompt)
        self.inputs = {}
        self.handles = [
            mixer.register_forward_pre_hook(self.keep_inputs, with_kwargs=True) for mixer in self.mixers.values()
        ]

    def keep_inputs(self, mixer, arguments, keywords):
        self.inputs[mixer] = keywords

    def replay(self, block, kept):
        for layer in self.attention:
            layer.crop(-(block.shape[1] - kept))
        for mixer in self.mixers.values():
            keywords = self.inputs[mixer]
            mixer(**{**keywords, "hidden_states": keywords["hidden_states"][:, :kept]})

    def close(self):
        for handle in self.handles:
            handle.remove()


class PerStepStates(TargetReplay):
    def __init__(self, target, prompt):
        super().__init__(target, prompt)
        self.steps = {index: [] for index in self.recurrent}
        for index, mixer in self.mixers.items():
            mixer.forward = self.step_by_step(mixer.forward, self.recurrent[index], self.steps[index])

    def step_by_step(self, forward, layer, steps):
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
        logits = self.target(input_ids=block, past_key_values=self.cache, use_cache=True).logits
        for layer in self.attention:
            layer.crop(-(block.shape[1] - kept))
        for index, layer in self.recurrent.items():
            layer.conv_states[0], layer.recurrent_states[0] = self.steps[index][kept - 1]
        return logits

    def close(self):
        for mixer in self.mixers.values():
            del mixer.forward


class OneToken(TargetReplay):
    """Not a way: what plain decoding pays for a token."""

    def block(self, block, kept):
        self.target(input_ids=block[:, :1], past_key_values=self.cache, use_cache=True)


WAYS = {
    "one pass": OnePass,
    "replay the mixers": MixerReplay,
    "replay the target": TargetReplay,
    "per-step states": PerStepStates,
    "(one token)": OneToken,
}


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
    parser.add_argument("--blocks", type=int, default=8, help="of each round")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    torch.manual_seed(0)
    target = make_target(args.hidden_size, args.layers, args.vocab_size).to(args.device, getattr(torch, args.dtype))
    prompt = torch.randint(0, args.vocab_size, (1, 128), device=args.device)
    rows = []
    for block_size in args.block_size:
        blocks = [
            torch.randint(0, args.vocab_size, (1, block_size), device=args.device)
            for _ in range(args.blocks + WARM_UP)
        ]
        logits, times = {}, {name: [] for name in WAYS}
        # Rounds, so that a machine that slows down slows all of them.
        for _ in range(ROUNDS):
            for name, way in WAYS.items():
                run = way(target, prompt)
                for number, block in enumerate(blocks):
                    if args.device != "cpu":
                        torch.accelerator.synchronize()
                    start = time.perf_counter()
                    out = run.block(block, min(args.kept, block_size))
                    if args.device != "cpu":
                        torch.accelerator.synchronize()
                    # The first blocks initialise what is initialised lazily.
                    if number >= WARM_UP:
                        times[name].append(time.perf_counter() - start)
                run.close()
                if out is not None:
                    logits[name] = out.float()
        for name, seconds in times.items():
            milliseconds = 1000 * sorted(seconds)[len(seconds) // 2]
            rows.append({"block_size": block_size, "way": name, "milliseconds": milliseconds})
        reference = logits["one pass"]
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
        settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
        settings["transformers"] = transformers.__version__
        args.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
