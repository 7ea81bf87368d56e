# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What drafters of SmolLM2-135M-Instruct are worth, setting by setting, next to speculators 0.9.0's on the same batches.

    mkdir -p quality_work && cp benchmarks/results/quality/replies.jsonl.gz quality_work/
    python benchmarks/quality.py --target SmolLM2-135M-Instruct --results outputs/quality --jobs 6 --gpus 2 --time-limit 300
    python benchmarks/quality.py --target SmolLM2-135M-Instruct --results outputs/quality --setting dpace --seed 1
    python benchmarks/quality.py --target SmolLM2-135M-Instruct --results outputs/quality --speed base muon_dpace speculators
    python benchmarks/quality.py --report docs/ablations.md
    python benchmarks/quality.py --example-card docs/example_card
    python benchmarks/quality.py --tiny --setting base                              # any CPU, seconds

The target is made by recipes/smollm2/build_smollm2.py. Its replies to the evaluation prompts are read from `--work`, so the first
line copies those that ship here; without them it writes its own to `--prompts`: JSONL rows with `messages`, one file a domain, which
`prompts_eval_DOMAIN.jsonl` names.

The second line trains all settings of `PRIORITY` that `--results` has no finished JSON of (its default holds those that ship here),
several at once on each GPU, the most telling ones first; what is cut off leaves its curve so far, and goes on from its checkpoint if
`--work` is still there.

Equal samples: the same rows in the same micro-batches in the same order for every setting of a seed, so figures do not depend
on how many runs share a GPU. Acceptance length: the greedy walk over replies that the target wrote. Speed is another matter:
`--speed` runs settings alone, one after the other.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from measuring import PACKAGES, version
from quality_data import RowsInMemory, prompt_of, tokenize_rows, write_replies
from quality_settings import PRIORITY, RECIPES, SETTINGS, name_of, options_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import set_seed

from hf_dflash import DFlashForSpeculation, DFlashTrainer, DFlashTrainingArguments, FrozenTarget, create_drafter_config
from hf_dflash.atomic_files import write_json
from hf_dflash.decoding.speculative import speculative_generate
from hf_dflash.drafter.configuration_dflash import find_mask_token_id
from hf_dflash.evaluation.acceptance import repeated_ngram_share
from hf_dflash.training.checkpoint import find_last_checkpoint
from hf_dflash.training.warm_start import initialize_from_target


HERE = Path(__file__).parent
# When a curve is measured, as shares of all steps; at the last point on all replies, before on a part of them.
POINTS = (1 / 8, 1 / 4, 1 / 2, 1)
DRAFTER_OPTIONS = set("num_hidden_layers block_size mask_token_id target_layer_ids sliding_window is_causal".split())
NOT_FOR_TRAINING = DRAFTER_OPTIONS | {"peer", "init_from_target", "target_dtype", "max_length"}


# ---- One run


class Curve(TrainerCallback):
    """Measures at `POINTS` and writes the run's JSON after each of them."""

    def __init__(self, write):
        self.write = write

    def on_train_begin(self, args, state, control, **kwargs):
        self.steps = {max(1, math.ceil(share * state.max_steps)) for share in POINTS}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            control.should_log = control.should_evaluate = True

    def on_log(self, args, state, control, **kwargs):
        if "eval_loss" in state.log_history[-1]:
            self.write(state)


def with_domains(
    trainer_class: type[DFlashTrainer], domains: dict[str, RowsInMemory], size: int
) -> type[DFlashTrainer]:
    """A trainer that measures its held-out rows and, before them, each domain: all rows at the end, at most `size` before."""

    class QualityTrainer(trainer_class):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            is_last = self.state.global_step >= self.state.max_steps
            metrics = {}
            for name, rows in domains.items():
                if is_last or not name.endswith("_t1"):
                    some = rows if is_last else thin_out(rows, size)
                    metrics |= super().evaluate(some, ignore_keys, f"eval_{name}")
            some = self.eval_dataset if is_last else thin_out(self.eval_dataset, 2 * size)
            return metrics | super().evaluate(some, ignore_keys, metric_key_prefix)

    return QualityTrainer


def thin_out(rows: RowsInMemory, size: int) -> RowsInMemory:
    """At most `size` rows, spread evenly."""
    return RowsInMemory(list(rows)[:: -(-len(rows) // size)])


def make_trainer(
    arguments, setting: str, seed: int, tokens: float, folder: Path, device: str, callbacks
) -> DFlashTrainer:
    options = options_of(setting)
    rows, replies = load_data(arguments)
    cuda = device.startswith("cuda")
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target_config = AutoConfig.from_pretrained(arguments.target)
    drafter_options = {name: value for name, value in options.items() if name in DRAFTER_OPTIONS}
    if arguments.tiny:
        drafter_options["mask_token_id"] = find_mask_token_id(tokenizer, target_config.vocab_size)
        options |= {"token_budget": 512, "num_anchors": 2}
    set_seed(seed)
    drafter = DFlashForSpeculation(
        create_drafter_config(
            target_config,
            target_name_or_path=arguments.target_hub_id,
            **drafter_options,
        )
    )
    dtype = torch.bfloat16 if cuda else torch.float32
    target = FrozenTarget(arguments.target, drafter.config.target_layer_ids, device=device, dtype=dtype)
    if options.get("init_from_target"):
        initialize_from_target(drafter, target.model)
    args = DFlashTrainingArguments(
        str(folder),
        **{name: value for name, value in options.items() if name not in NOT_FOR_TRAINING},
        eval_token_budget=4096,
        num_train_epochs=tokens / sum(rows["train"]["length"]),
        attention_backend=arguments.attention if cuda else "dense",
        compile_layers=arguments.compile,
        target_cuda_graphs=arguments.graphs if cuda else "off",
        logging_steps=25,
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        run_log=False,
        bf16=cuda,
        use_cpu=not cuda,
        dataloader_num_workers=1 if cuda else 0,
        disable_tqdm=True,
        seed=seed,
        target_hub_id=arguments.target_hub_id,
        hub_license="apache-2.0",
    )
    trainer_class, more = DFlashTrainer, {}
    if "peer" in options:
        from speculators_trainer import SpeculatorsTrainer

        trainer_class, more = SpeculatorsTrainer, {"peer_options": options["peer"]}
    trainer_class = with_domains(trainer_class, replies, arguments.rows_at_points)
    return trainer_class(
        drafter,
        target,
        args,
        train_dataset=rows["train"],
        eval_dataset=thin_out(rows["heldout"], arguments.heldout_rows),
        callbacks=callbacks,
        **more,
    )


def load_data(arguments) -> tuple[dict[str, RowsInMemory], dict[str, RowsInMemory]]:
    rows = tokenize_rows(arguments.completions, arguments.target, arguments.work / "rows.npz", arguments.max_length)
    replies = write_replies(
        arguments.target,
        arguments.prompts,
        rows["heldout"],
        arguments.work / "replies.jsonl.gz",
        num_heldout=arguments.heldout_rows // 2,
        max_length=arguments.max_length,
        max_new_tokens=arguments.max_new_tokens,
        device=device_of(arguments),
    )
    return rows, replies


def device_of(arguments) -> str:
    return "cuda:0" if torch.cuda.is_available() and not arguments.tiny else "cpu"


def run_setting(arguments, setting: str, seed: int, tokens: float) -> dict:
    """Trains, measures, decodes where asked for, and writes `results`/NAME.json."""
    name = name_of(setting, seed, tokens)
    folder, path = arguments.work / "runs" / name, arguments.results / f"{name}.json"
    device = device_of(arguments)
    result = json.loads(path.read_text()) if path.exists() else {}
    drafter_folder = folder / "drafter"
    if not result.get("finished"):
        started = time.perf_counter()

        def write(state):
            result.update(describe_run(trainer, arguments, setting, seed, tokens, started))
            save_json(path, result)

        trainer = make_trainer(arguments, setting, seed, tokens, folder, device, [Curve(write)])
        checkpoint = find_last_checkpoint(str(folder)) if folder.exists() else None
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(drafter_folder))
        if arguments.card:
            write_card(trainer, arguments.results / f"card-{name}")
        result["finished"] = True
        save_json(path, result)
        del trainer
    if arguments.decode and "decoded" not in result:
        result["decoded"] = decode(arguments, drafter_folder, device)
        save_json(path, result)
    return result


def describe_run(trainer: DFlashTrainer, arguments, setting: str, seed: int, tokens: float, started: float) -> dict:
    history = trainer.state.log_history
    steps = sorted({entry["step"] for entry in history if any(key.startswith("eval_") for key in entry)})
    tokens_a_step = tokens / trainer.state.max_steps
    curve = []
    for step in steps:
        point = {"step": step, "tokens": round(step * tokens_a_step)}
        for entry in history:
            if entry["step"] == step:
                for key, value in entry.items():
                    if key.startswith("eval_") and key.endswith(("acceptance_length", "_loss", "target_agreement")):
                        if "anchor" not in key or key == "eval_anchor_acceptance_length":
                            point[key.removeprefix("eval_")] = round(value, 4)
                    elif key.startswith("eval_accuracy"):
                        point[key.removeprefix("eval_")] = round(value, 4)
        curve.append(point)
    logged = [entry for entry in history if "context_tokens" in entry]
    cuda = torch.cuda.is_available()
    return {
        "setting": setting,
        "seed": seed,
        "tokens": tokens,
        "options": options_of(setting),
        "target_layer_ids": list(trainer.drafter_config.target_layer_ids),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "target": Path(arguments.target).name,
        "rows": {"train": len(trainer.train_dataset), "heldout": len(trainer.eval_dataset)},
        # Loops are easy to draft.
        "repeated_4grams_of_heldout_replies": round(share_of_repeated_4grams(trainer.eval_dataset), 3),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "runs_at_once_on_the_device": arguments.jobs,
        "versions": {package: version(package) for package in PACKAGES if version(package)},
        "finished": False,
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "blocks": sum(entry["blocks"] for entry in logged),
        "seconds_since_start": round(time.perf_counter() - started, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "loss": [[entry["step"], round(entry["loss"], 4)] for entry in logged][:: max(1, len(logged) // 40)],
        "curve": curve,
    }


def share_of_repeated_4grams(rows: RowsInMemory) -> float:
    """Of all 4-grams of the replies, those that stood in the same reply before."""
    replies = [row["input_ids"][row["loss_mask"]].tolist() for row in rows]
    weights = [max(0, len(reply) - 3) for reply in replies]
    shares = [repeated_ngram_share(reply) for reply in replies]
    return sum(share * weight for share, weight in zip(shares, weights, strict=True)) / max(1, sum(weights))


def write_card(trainer: DFlashTrainer, folder: Path) -> None:
    """What `DFlashTrainer` writes beside a drafter, without the weights; and its log, from which curves can be drawn elsewhere."""
    output_dir, trainer.args.output_dir = trainer.args.output_dir, str(folder)
    try:
        trainer.create_model_card()
        trainer.drafter_config.save_pretrained(folder)
        save_json(folder / "log_history.json", trainer.state.log_history)
    finally:
        trainer.args.output_dir = output_dir


@torch.no_grad()
def decode(arguments, drafter_folder: Path, device: str) -> dict:
    """
    Real decoding in fp32 of a few prompts of each domain, greedily and at T = 1, beside the walk over the very same text.

    Returns:
        `dict`: by temperature, tokens / blocks as decoded, as walked, and how many greedy outputs equal plain decoding's.
    """
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).to(device).eval()
    drafter = DFlashForSpeculation.from_pretrained(drafter_folder, dtype=torch.float32).to(device).eval()
    rows, replies = load_data(arguments)
    args = DFlashTrainingArguments(
        str(arguments.work / "decode"),
        attention_backend="dense",
        compile_layers="off",
        use_cpu=device == "cpu",
        report_to="none",
        run_log=False,
        disable_tqdm=True,
    )
    walker = DFlashTrainer(
        drafter, FrozenTarget(target, drafter.config.target_layer_ids), args, eval_dataset=rows["heldout"]
    )
    sets = {"heldout": rows["heldout"], **{k: v for k, v in replies.items() if not k.endswith("_t1")}}
    results = {}
    for way, options in (("greedy", {"do_sample": False}), ("t1", {"do_sample": True, "temperature": 1.0})):
        lengths, walked, identical, compared, by_set = [], [], 0, 0, {}
        for name, some in sets.items():
            of_set = []
            for row in thin_out(some, arguments.decode)[: arguments.decode]:
                prompt = torch.tensor(prompt_of(row), dtype=torch.long, device=device)[None]
                generator = torch.Generator(device).manual_seed(0) if options["do_sample"] else None
                output = speculative_generate(
                    target, drafter, prompt, max_new_tokens=arguments.decode_tokens, generator=generator, **options
                )
                of_set += output.acceptance_lengths[0]
                walked += walker.simulate_acceptance(output.sequences[0].cpu(), prompt.shape[1])
                if way == "greedy":
                    plain = target.generate(
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        max_new_tokens=arguments.decode_tokens,
                        do_sample=False,
                    )
                    compared += 1
                    identical += torch.equal(plain, output.sequences)
            by_set[name] = round(sum(of_set) / max(1, len(of_set)), 4)
            lengths += of_set
        results[way] = {
            "decoded_acceptance_length": round(sum(lengths) / max(1, len(lengths)), 4),
            "walked_acceptance_length": round(sum(walked) / max(1, len(walked)), 4),
            "by_set": by_set,
            "blocks": len(lengths),
        }
        if compared:
            results[way] |= {"identical_to_plain": identical, "compared": compared}
    return results


def measure_speed(arguments, setting: str) -> dict:
    """Context tokens a second of a setting alone on its GPU, compilation and recording of graphs left out."""
    warm_up, steps = (1, 3) if arguments.tiny else (25, 60)
    times, tokens = [], []

    class Clock(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            # A shape has a graph once it has come twice, most of them after an epoch.
            self.begin = warm_up if args.target_cuda_graphs == "off" else max(warm_up, state.max_steps - steps - 1)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (self.begin, self.begin + steps):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
                tokens.append(float(trainer._train_sums["tokens"]) + sum(logged))
            control.should_training_stop = state.global_step == self.begin + steps

        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append((logs or {}).get("context_tokens", 0))

    logged = []
    folder = arguments.work / "speed" / setting
    trainer = make_trainer(arguments, setting, 0, arguments.tokens, folder, device_of(arguments), [Clock()])
    trainer.train()
    result = {
        "setting": setting,
        "context_tokens_per_second": round((tokens[-1] - tokens[0]) / (times[-1] - times[0])),
        "steps_per_second": round(steps / (times[-1] - times[0]), 2),
        "attention": trainer.args.attention_backend,
        "compile_layers": trainer.args.compile_layers,
        "target_cuda_graphs": trainer.args.target_cuda_graphs,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {package: version(package) for package in PACKAGES if version(package)},
    }
    path = arguments.results / "speed.json"
    all_results = json.loads(path.read_text()) if path.exists() else []
    save_json(path, [*all_results, result])
    print("SPEED", json.dumps(result), flush=True)
    return result


def save_json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)


# ---- Many runs


def drive(arguments, argv: list[str]) -> None:
    """Keeps `--jobs` runs going on each GPU until all are done or the time is over."""
    start = time.perf_counter()
    remaining = [
        (setting, seed)
        for setting, seed in (arguments.only or PRIORITY)
        if not is_finished(arguments, setting, seed, arguments.tokens)
    ]
    load_data(arguments)
    print(f"[{time.perf_counter() - start:5.0f} s] data ready, {len(remaining)} runs to do", flush=True)
    running: dict[int, tuple] = {}
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(arguments.gpus)))
    slots = [device for _ in range(arguments.jobs) for device in devices.split(",")[: arguments.gpus]]
    durations: list[float] = []
    logs = arguments.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return arguments.time_limit - (time.perf_counter() - start)

    def can_start() -> bool:
        return bool(remaining) and left() > min(durations, default=0)

    while running or can_start():
        for slot, device in enumerate(slots):
            if slot in running or not can_start():
                continue
            setting, seed = remaining.pop(0)
            name = name_of(setting, seed, arguments.tokens)
            command = [sys.executable, str(Path(__file__)), *argv, "--setting", setting, "--seed", str(seed)]
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": device,
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
                "TOKENIZERS_PARALLELISM": "false",
            }
            log = open(logs / f"{name}.log", "w")  # noqa: SIM115 (the child writes to it)
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            running[slot] = (process, setting, seed, time.perf_counter())
        for slot, (process, setting, seed, begin) in list(running.items()):
            if process.poll() is None:
                continue
            del running[slot]
            name = name_of(setting, seed, arguments.tokens)
            seconds = time.perf_counter() - begin
            print(f"[{time.perf_counter() - start:5.0f} s] {name} took {seconds:.0f} s: ", end="")
            if process.returncode == 0:
                durations.append(seconds)
                print(summary_line(arguments, setting, seed), flush=True)
            else:
                tail = (logs / f"{name}.log").read_text().strip().splitlines()[-12:]
                print(f"failed with {process.returncode}\n  " + "\n  ".join(tail), flush=True)
        if left() <= 0:
            remaining = []
            # A trainer saves a checkpoint and leaves; the curve so far is written already.
            for process, *_ in running.values():
                process.send_signal(signal.SIGTERM)
            for process, setting, seed, _ in running.values():
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()
                print(f"cut off: {name_of(setting, seed, arguments.tokens)} {summary_line(arguments, setting, seed)}")
            running = {}
        time.sleep(0.5)


def is_finished(arguments, setting: str, seed: int, tokens: float) -> bool:
    path = arguments.results / f"{name_of(setting, seed, tokens)}.json"
    return path.exists() and json.loads(path.read_text())["finished"]


def summary_line(arguments, setting: str, seed: int) -> str:
    path = arguments.results / f"{name_of(setting, seed, arguments.tokens)}.json"
    if not path.exists():
        return "nothing measured yet"
    result = json.loads(path.read_text())
    return f"step {result['steps']} of {result['max_steps']}: " + ", ".join(
        f"{key.removesuffix('acceptance_length').strip('_') or 'heldout'} {value:.3f}"
        for key, value in result["curve"][-1].items()
        if key.endswith("acceptance_length") and "anchor" not in key
    )


def setting_and_seed(text: str) -> tuple[str, int]:
    setting, _, seed = text.partition(":")
    if setting not in (*SETTINGS, "recipe"):
        raise argparse.ArgumentTypeError(f"{setting} is no setting: {', '.join([*SETTINGS, 'recipe'])}")
    return setting, int(seed or 0)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Options of the runs, for this script and others that make them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder of SmolLM2-135M-Instruct, see recipes/smollm2/build_smollm2.py")
    parser.add_argument("--target-hub-id", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--completions", type=Path, default=RECIPES / "smollm2" / "completions.jsonl.gz")
    parser.add_argument(
        "--prompts", type=Path, nargs="*", default=[], help="evaluation prompts, a JSONL file a domain"
    )
    parser.add_argument("--work", type=Path, default=Path("quality_work"), help="tokens, replies, checkpoints, logs")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "quality", help="a JSON for each run")
    parser.add_argument("--setting", type=setting_and_seed, help="train this one, in this process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=float, default=6e6, help="context tokens to train on")
    parser.add_argument("--jobs", type=int, default=6, help="runs at once on each GPU")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds of the driver")
    parser.add_argument(
        "--only", type=setting_and_seed, nargs="*", help="SETTING:SEED ... in this order, not PRIORITY"
    )
    parser.add_argument("--speed", type=setting_and_seed, nargs="*", help="tokens a second of these settings, alone")
    parser.add_argument("--decode", type=int, default=0, help="prompts of each domain to decode really, in fp32")
    parser.add_argument("--decode-tokens", type=int, default=96)
    parser.add_argument("--card", action="store_true", help="also write the drafter's card beside the result")
    parser.add_argument("--attention", default="dense", choices=["dense", "flex", "auto"])
    parser.add_argument("--compile", default="off", choices=["off", "on", "auto"], help="layers, one by one")
    parser.add_argument("--graphs", default="off", choices=["off", "on", "auto"], help="of the target's passes")
    parser.add_argument("--max-length", type=int, default=1024, help="of prompt and reply")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="of replies, as in the shipped completions")
    parser.add_argument("--heldout-rows", type=int, default=200)
    parser.add_argument("--rows-at-points", type=int, default=24, help="of each domain, before the last point")
    parser.add_argument("--report", type=Path, help="write table and curves of all results into this Markdown file")
    parser.add_argument("--example-card", type=Path, help="write the card of the recipe's drafter into this folder")
    parser.add_argument("--tiny", action="store_true", help="a random target and few rows, for a CPU")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)

    if arguments.report:
        from quality_report import write_report

        write_report(arguments.results, arguments.report)
        return
    if arguments.example_card:
        from quality_report import write_example_card

        write_example_card(arguments.results, arguments.example_card)
        return
    if arguments.tiny:
        from quality_tiny import make_tiny

        make_tiny(arguments)
    if arguments.target is None:
        parser.error("--target is needed")
    if arguments.speed:
        for setting, _ in arguments.speed:
            measure_speed(arguments, setting)
    elif arguments.setting:
        result = run_setting(arguments, arguments.setting[0], arguments.seed, arguments.tokens)
        print("DONE", json.dumps({"setting": result["setting"], "seed": result["seed"], "last": result["curve"][-1]}))
    else:
        drive(arguments, argv)


if __name__ == "__main__":
    main()
