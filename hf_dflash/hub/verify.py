# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Does a saved drafter work, and would each engine compute what was trained? `hf-dflash verify DRAFTER --target TARGET`.

What can be run here is run: decoding against the target alone, the exported form's own code, speculators if it is installed.
The other engines are judged by what their releases do with the config (`portability.py`).
"""

import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from ..command_line import DTYPES, CommandParser, at_least_one, available_device
from ..decoding.borrowed_layers import embed_slots
from ..decoding.speculative import speculative_generate
from ..evaluation.benchmark import find_first_difference
from ..evaluation.prompts import encode_prompt
from ..target.hook_capture import HookCapture
from .foreign_layouts import read_drafter
from .layouts import check_fits_target, write_serving_form
from .portability import ENGINES, find_problems


# Hidden states are of order 1; fp32 sums in another order differ by 1e-6.
TOLERANCE = 1e-5

DEFAULT_PROMPTS = (
    "How many positive divisors does 196 have?",
    "Write a Python function that reverses a linked list.",
    "Explain in two sentences why the sky is blue.",
)


@dataclass
class Verdict:
    """
    Args:
        engine (`str`): one of `ENGINES`.
        is_right (`bool`, *optional*): `None` where nothing could be run and the config gives no reason to doubt.
        reason (`str`): what was seen.
    """

    engine: str
    is_right: bool | None
    reason: str

    def __str__(self) -> str:
        word = {True: "ok", False: "WRONG", None: "not run"}[self.is_right]
        return f"{self.engine:<13} {word:<8} {self.reason}"


@dataclass
class Probe:
    """One block behind the context of a real text, as every implementation is asked to compute it.

    Shapes: n tokens, K captured layers, H hidden size, B slots, anchor a.
    """

    input_ids: torch.LongTensor
    features: torch.Tensor
    slots: torch.Tensor
    anchor: int

    def run(self, drafter) -> torch.Tensor:
        """Hidden states `[1, B, H]` of a drafter with our signature."""
        positions = torch.arange(self.anchor + self.slots.shape[1])[None]
        with torch.no_grad():
            return drafter(self.slots, self.features[:, : self.anchor], positions).last_hidden_state


def verify_drafter(
    drafter: str | Path,
    target: str | Path,
    *,
    prompts: list[str] | list[list[int]] | None = None,
    max_new_tokens: int = 48,
    dtype: torch.dtype | str = "auto",
    device: str | None = None,
) -> list[Verdict]:
    """
    Loads a drafter in any layout, decodes a handful of prompts, and compares implementations on one block.

    Args:
        drafter (`str` or `Path`): folder or Hub id, in our native form or one that [`import_drafter`] reads.
        target (`str` or `Path`): folder or Hub id.
        prompts (`list[str]` or `list[list[int]]`, *optional*): user messages, or token ids.
        max_new_tokens (`int`, *optional*, defaults to 48): decoded for each prompt.
        dtype (`torch.dtype` or `str`, *optional*, defaults to `"auto"`): of the target. Below fp32 two tokens may tie, and come
            out otherwise in a pass over a block than in a pass over one token; such ties are counted, and are no fault.
        device (`str`, *optional*): of the target and of decoding; CUDA where there is one.

    Returns:
        `list[Verdict]`: one for each engine.

    Raises:
        `ValueError`: if the files are not a whole drafter for that target.
        `OSError`: if one of both cannot be read.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = read_drafter(drafter, target=str(target))
    # Every form is saved in bf16 at last, so that is what is compared.
    model = model.to(torch.bfloat16).float().eval()
    target_model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
    check_fits_target(model.config, target_model.config)
    encoded = _encode_prompts(target, prompts or DEFAULT_PROMPTS)

    problems = find_problems(model.config)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_serving_form(folder, model.config, model.state_dict(), target_model.config, str(target))
        verdicts = [_verify_transformers(model, target_model, encoded, folder, max_new_tokens)]
        probe = _make_probe(model, target_model, encoded[0])
        if importlib.util.find_spec("speculators") is not None and Path(target).is_dir():
            problems = [problem for problem in problems if problem.engine != "speculators"]
            verdicts.append(_compare("speculators", probe.run(model), _run_speculators(folder, probe)))
    for engine in ENGINES:
        reasons = [f"{problem.reason} {problem.fix}" for problem in problems if problem.engine == engine]
        if reasons:
            verdicts.append(Verdict(engine, False, " ".join(reasons)))
        elif engine not in [verdict.engine for verdict in verdicts]:
            verdicts.append(Verdict(engine, None, "the config means there what it means here"))
    return verdicts


def _encode_prompts(target, prompts) -> list[torch.LongTensor]:
    if not isinstance(prompts[0], str):
        return [torch.tensor([ids]) for ids in prompts]
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [encode_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]


def _verify_transformers(model, target, encoded, folder, max_new_tokens) -> Verdict:
    """Decoding with our code and with the code that is shipped, against the target alone."""
    shipped = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    decoders = {"hf_dflash": model, "the shipped code": shipped}
    lengths, different, num_ties = [], [], 0
    for drafter in decoders.values():
        drafter.to(target.device, target.dtype)
    for i, input_ids in enumerate(encoded):
        input_ids = input_ids.to(target.device)
        # Given by hand, or `generate` takes pad tokens in a chat template for padding.
        out = speculative_generate(target, model, input_ids, torch.ones_like(input_ids), max_new_tokens=max_new_tokens)
        lengths += out.acceptance_lengths[0]
        outputs = {
            "hf_dflash": out.sequences,
            "the shipped code": shipped.spec_generate(input_ids, target, max_new_tokens),
        }
        for name, tokens in outputs.items():
            ties = _count_ties(target, input_ids, tokens, max_new_tokens)
            if ties is None:
                different.append(f"prompt {i} with {name}")
            num_ties += ties or 0
    for drafter in decoders.values():
        drafter.to("cpu", torch.float32)
    if different:
        return Verdict("transformers", False, f"not what the target decodes alone: {', '.join(different)}")
    mean = sum(lengths) / max(len(lengths), 1)
    reason = (
        f"{len(encoded)} prompts decoded as the target alone does, acceptance length {mean:.2f} (bonus token included)"
    )
    if num_ties:
        dtype = str(target.dtype).removeprefix("torch.")
        reason += f"; tokens that tie within the rounding of {dtype} fell otherwise {num_ties} times"
    return Verdict("transformers", True, reason)


def _count_ties(target, prompt: torch.LongTensor, output: torch.LongTensor, max_new_tokens: int) -> int | None:
    """
    How often the target alone chooses another token than `output` has, `[1, length]`, because two of them tie; `None` if it
    chooses another one where there is no tie.

    A tie is what the target itself does not settle: its logits differ by no more than they move between passes over one token
    and a pass over all of them. Behind a tie the target goes on from the token of `output`.
    """
    known, num_ties = prompt, 0
    while True:
        alone = target.generate(
            known,
            attention_mask=torch.ones_like(known),
            max_new_tokens=max_new_tokens - (known.shape[1] - prompt.shape[1]),
            do_sample=False,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        place = find_first_difference(output[0], alone.sequences[0])
        if place == -1:
            return num_ties
        if place >= min(output.shape[1], alone.sequences.shape[1]):
            return None
        with torch.no_grad():
            in_one_pass = target(alone.sequences, use_cache=False).logits[0, known.shape[1] - 1 : -1]
        rounding = (torch.cat(alone.logits) - in_one_pass).abs().max()
        scores = alone.scores[place - known.shape[1]][0]
        if scores[alone.sequences[0, place]] - scores[output[0, place]] > 2 * rounding:
            return None
        num_ties += 1
        known = output[:, : place + 1]
        if known.shape[1] == output.shape[1]:
            return num_ties


def _make_probe(model, target, input_ids) -> Probe:
    block_size = model.config.block_size
    # speculators wants a whole block of tokens behind the anchor.
    input_ids = target.generate(
        input_ids.to(target.device), max_new_tokens=block_size + 8, min_new_tokens=block_size + 8, do_sample=False
    )
    with torch.no_grad(), HookCapture(target, model.config.target_layer_ids) as capture:
        target(input_ids, use_cache=False)
        features = torch.cat(capture.features, dim=-1).float().cpu()
        anchor = input_ids.shape[1] - block_size - 1
        slots = torch.full((1, block_size), model.config.mask_token_id, device=target.device)
        slots[0, 0] = input_ids[0, anchor]
        return Probe(input_ids.cpu(), features, embed_slots(target, slots).float().cpu(), anchor)


def _run_speculators(folder: Path, probe: Probe) -> torch.Tensor:
    from loguru import logger
    from speculators import SpeculatorModel
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    # It tells stderr what it loads, a folder that is gone when the verdicts stand there.
    logger.disable("speculators")
    try:
        peer = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    finally:
        logger.enable("speculators")
    # The only position that may be an anchor, so the one that it draws.
    loss_mask = torch.zeros(probe.input_ids.shape, dtype=torch.long)
    loss_mask[0, probe.anchor] = 1
    with torch.no_grad():
        hidden_states, *_ = peer._backbone_forward(
            hidden_states=probe.features,
            input_ids=probe.input_ids,
            loss_mask=loss_mask,
            verifier_last_hidden_states=torch.zeros_like(
                probe.features[..., : config.transformer_layer_config.hidden_size]
            ),
            document_ids=torch.zeros_like(probe.input_ids),
            max_anchors=1,
        )
    return hidden_states


def _compare(engine: str, ours: torch.Tensor, theirs: torch.Tensor) -> Verdict:
    difference = float((ours - theirs).abs().max())
    return Verdict(engine, difference <= TOLERANCE, f"hidden states of one block differ by {difference:.1e} at most")


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash verify DRAFTER --target TARGET`: 0 if no engine is wrong, else 1."""
    parser = CommandParser(
        prog="hf-dflash verify", description="Check that a drafter works, and what each engine would make of it."
    )
    parser.add_argument("drafter", help="folder or Hub id, in any layout that `hf-dflash import` reads")
    parser.add_argument("--target", required=True, help="folder or Hub id")
    parser.add_argument("--prompt", action="append", help="a user message; may be repeated")
    parser.add_argument(
        "--max_new_tokens", type=at_least_one, default=48, help="decoded for each (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES],
        help="of the target (default: as it was saved)",
    )
    parser.add_argument(
        "--device", type=available_device, help="of target and decoding (default: cuda if there is one)"
    )
    arguments = parser.parse_args(argv)
    verdicts = verify_drafter(
        arguments.drafter,
        arguments.target,
        prompts=arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    print("\n".join(map(str, verdicts)))
    return int(any(verdict.is_right is False for verdict in verdicts))
