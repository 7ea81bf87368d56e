# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What `head_fp8` costs in accuracy: gradients of a trained drafter, and short trainings with and without it.

    python benchmarks/fp8_head.py --stages gradients --target SmolLM2-135M-Instruct --drafter DRAFTER --output gradients.json
    OMP_NUM_THREADS=1 python benchmarks/fp8_head.py --stages trainings --output trainings.json
    python benchmarks/fp8_head.py --tiny

Any CPU: the head in FP8 has the same numbers there. All gradients are of the same blocks of held-out rows of recipes/smollm2,
against a head in fp32, in which everything else is computed; that of bf16 is what training has without `head_fp8`. Other
ways to round are measured beside the one that is used. What a GPU's tensor cores lose in long sums is not in it, and speed is
another matter (benchmarks/train_step.py). The trainings are those of the pocket target (recipes/quickstart.yaml), cut short.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from measuring import Report
from quality_data import RowsInMemory, pick_evenly, tokenize_rows
from quality_settings import RECIPES
from transformers import AutoConfig, AutoTokenizer
from transformers.trainer_utils import set_seed

from hf_dflash import DFlashForSpeculation, DFlashTrainer, DFlashTrainingArguments, FrozenTarget, create_drafter_config
from hf_dflash.data.batching import collate_rows
from hf_dflash.drafter.configuration_dflash import find_mask_token_id
from hf_dflash.drafter.fp8_head import Fp8Gradient, Fp8Head
from hf_dflash.drafter.losses import compute_dflash_loss
from hf_dflash.target.fp8 import round_to_fp8
from hf_dflash.target.language_head import LanguageHead


POCKET_DRAFTER = {"num_hidden_layers": 2, "block_size": 6, "num_target_features": 3}
POCKET_TRAINING = {
    "num_anchors": 16,
    "loss_weighting": "dpace",
    "matrix_optimizer": "muon",
    "learning_rate": 6e-3,
    "weight_decay": 0.0,
    "token_budget": 1024,
    "eval_blocks_per_pass": 1024,
}


# ---- Ways to round


class WithRoundedLabel(Fp8Head):
    """The label's entry is rounded like all others."""

    def unfinish(self, logits, grad_logits, labels):
        values, scales = round_to_fp8(LanguageHead.unfinish(self, logits, grad_logits))
        return Fp8Gradient(values, scales, labels, torch.zeros(len(labels)))


class InE5m2(Fp8Head):
    """The gradient in e5m2, whose range needs no scale of its own for each slot."""

    def unfinish(self, logits, grad_logits, labels):
        gradient = LanguageHead.unfinish(self, logits, grad_logits)
        at_labels = gradient.gather(1, labels[:, None]).squeeze(1).float()
        return self._round(gradient.scatter(1, labels[:, None], 0.0), labels, at_labels)

    def _round(self, gradient, labels, at_labels):
        values = (gradient.float() * 2**14).to(torch.float8_e5m2)
        return Fp8Gradient(values, torch.full((len(labels), 1), 2.0**-14), labels, at_labels)


class InE5m2WithRoundedLabel(InE5m2):
    def unfinish(self, logits, grad_logits, labels):
        gradient = LanguageHead.unfinish(self, logits, grad_logits)
        return self._round(gradient, labels, torch.zeros(len(labels)))


class LogitsOnly(Fp8Head):
    unfinish, multiply_gradient = LanguageHead.unfinish, LanguageHead.multiply_gradient


class GradientOnly(Fp8Head):
    project = LanguageHead.project


WAYS = {
    "bf16": LanguageHead,
    "FP8": Fp8Head,
    "FP8, label rounded too": WithRoundedLabel,
    "FP8, e5m2": InE5m2,
    "FP8, e5m2, label rounded too": InE5m2WithRoundedLabel,
    "FP8 for the logits only": LogitsOnly,
    "FP8 for the gradient only": GradientOnly,
}


# ---- Gradients


class Gradients:
    """Of one micro-batch of held-out rows, through a drafter that is computed once."""

    def __init__(self, trainer: DFlashTrainer, rows: list[dict]):
        self.batch = trainer.draw(collate_rows(rows), 0)
        features = trainer.request_of(self.batch).run(trainer.target)
        self.hidden_states, _ = trainer.draft(trainer.model, self.batch, features)
        self.labels = features.label_ids[self.batch.label_index]
        self.parameters = [p for p in trainer.model.parameters() if p.requires_grad]
        self.head = trainer.target.head
        self.reference = self.compute(self.head)

    def compute(self, head) -> dict:
        loss, correct = compute_dflash_loss(
            self.hidden_states, head, self.labels, self.batch.supervised, slot_indices=self.batch.slot_indices
        )
        inputs = [self.hidden_states, *self.parameters]
        by_states, *by_parameters = torch.autograd.grad(loss, inputs, retain_graph=True)
        return {
            "loss": float(loss.detach()),
            "correct": correct,
            "hidden states": by_states.double().flatten(),
            "parameters": torch.cat([gradient.double().flatten() for gradient in by_parameters]),
        }

    def describe(self) -> dict:
        correct = self.reference["correct"].sum() / self.batch.supervised.sum()
        return {
            "blocks": int(self.batch.num_blocks),
            "slots": len(self.batch.slot_indices),
            "loss": self.reference["loss"],
            "accuracy": float(correct),
        }

    def compare(self, way: str) -> dict:
        head = self.head.to(torch.device("cpu"), torch.bfloat16)
        result = self.compute(WAYS[way](head.weight, head.bias, head.scale, head.softcap))
        differs = (result["correct"] != self.reference["correct"]).sum() / self.batch.supervised.sum()
        values = {
            "loss differs by %": 100 * (result["loss"] / self.reference["loss"] - 1),
            "correct differs, %": 100 * float(differs),
        }
        for name in ("hidden states", "parameters"):
            gradient, reference = result[name], self.reference[name]
            cosine = torch.dot(gradient, reference) / gradient.norm() / reference.norm()
            values[f"{name}: error, %"] = 100 * float((gradient - reference).norm() / reference.norm())
            values[f"{name}: 1 - cosine, millionths"] = 1e6 * float(1 - cosine)
        return values


def make_trainer(drafter, target: str, rows: RowsInMemory, folder: str, heldout=None, **options) -> DFlashTrainer:
    args = DFlashTrainingArguments(
        folder,
        anchor_ratio=0,
        compile_layers="off",
        use_cpu=True,
        report_to="none",
        run_log=False,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        **options,
    )
    frozen = FrozenTarget(target, drafter.config.target_layer_ids, dtype=torch.float32)
    return DFlashTrainer(drafter, frozen, args, train_dataset=rows, eval_dataset=heldout)


# ---- Trainings


def new_drafter(target: str, seed: int) -> DFlashForSpeculation:
    config, tokenizer = AutoConfig.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    set_seed(seed)
    mask_token_id = find_mask_token_id(tokenizer, config.vocab_size)
    return DFlashForSpeculation(create_drafter_config(config, mask_token_id=mask_token_id, **POCKET_DRAFTER))


def train(arguments, rows: dict[str, RowsInMemory], target: str, seed: int, head_fp8: bool) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            new_drafter(target, seed),
            target,
            rows["train"],
            folder,
            RowsInMemory(pick_evenly(rows["heldout"], arguments.eval_rows)),
            seed=seed,
            max_steps=arguments.steps,
            head_fp8=head_fp8,
            **POCKET_TRAINING,
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "learning_rate" in entry]
        measured = trainer.evaluate()
    return {
        "loss of the last 50 steps": sum(losses[-50:]) / len(losses[-50:]),
        "held-out loss": measured["eval_loss"],
        "acceptance length": measured["eval_acceptance_length"],
        "steps": trainer.state.global_step,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of SmolLM2-135M-Instruct, see recipes/smollm2/build_smollm2.py")
    parser.add_argument("--drafter", help="a trained drafter of it")
    parser.add_argument("--stages", nargs="*", default=["gradients", "trainings"])
    parser.add_argument("--completions", type=Path, default=RECIPES / "smollm2" / "completions.jsonl.gz")
    parser.add_argument("--pocket", default=str(RECIPES / "pocket"), help="the target of the trainings")
    parser.add_argument("--work", type=Path, default=Path("fp8_head_work"), help="where tokens are kept")
    parser.add_argument("--rows", type=int, default=16, help="held-out rows, of 24 blocks each")
    parser.add_argument("--steps", type=int, default=150, help="of a training")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1], help="of the trainings, each with and without")
    parser.add_argument("--eval-rows", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a random target and few rows, in seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        pocket_completions = Path(args.pocket) / "completions_train.jsonl.gz"
        if args.tiny:
            from quality_tiny import make_tiny

            args.work, args.tokens = Path(temporary), 0.0
            make_tiny(args)
            args.pocket, pocket_completions = args.target, args.completions
            args.rows, args.steps, args.seeds, args.eval_rows = 2, 3, [0], 1
        elif "gradients" in args.stages and not (args.target and args.drafter):
            parser.error("--target and --drafter are needed")
        report = Report(
            args.output,
            torch.device("cpu"),
            target=Path(args.target).name if "gradients" in args.stages else None,
            threads=torch.get_num_threads(),
            training=POCKET_DRAFTER | POCKET_TRAINING if "trainings" in args.stages else None,
        )
        if "gradients" in args.stages:
            measure_gradients(args, report, temporary)
        if "trainings" not in args.stages:
            return 0
        rows = tokenize_rows(pocket_completions, args.pocket, args.work / "pocket_rows.npz", 512)
        for seed in args.seeds:
            for head_fp8 in (False, True):
                report.run(
                    f"training, {'head_fp8' if head_fp8 else 'head as it is'}, seed {seed}",
                    lambda s=seed, f=head_fp8: train(args, rows, args.pocket, s, f),
                    seconds=1200,
                )
    return 0


def measure_gradients(args, report: Report, folder: str) -> None:
    rows = tokenize_rows(args.completions, args.target, args.work / "rows.npz", 1024)
    if args.tiny:
        drafter = new_drafter(args.target, 0)
    else:
        drafter = DFlashForSpeculation.from_pretrained(args.drafter, dtype=torch.float32)
    trainer = make_trainer(drafter, args.target, rows["train"], folder, num_anchors=24)
    trainer.model.eval()
    gradients = Gradients(trainer, pick_evenly(rows["heldout"], args.rows))
    report.run("blocks", gradients.describe)
    for way in WAYS:
        report.run(f"gradient, {way}", lambda w=way: gradients.compare(w))


if __name__ == "__main__":
    sys.exit(main())
