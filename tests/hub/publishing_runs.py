# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Training runs that publish, in a process of its own: `HF_ENDPOINT` is read when huggingface_hub is imported.

Takes a folder, and writes `seen.pt` into it.
"""

import contextlib
import io
import os
import re
import signal
import sys
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from peft import LoraConfig
from tiny_models import make_target
from tiny_tokenizers import make_tokenizer
from tiny_training import make_dataset, make_trainer
from transformers import AutoModel, TrainerCallback

from hf_dflash.hub.publishing import push_to_hub


class StopAtFirstStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


def run_card(code: str) -> str:
    """What the card's Python prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("512", "16"), {})
    return printed.getvalue()


def main(folder: Path) -> None:
    target = make_target("qwen3_5", vocab_size=400)
    target.push_to_hub("alice/target")
    make_tokenizer().push_to_hub("alice/target")
    seen = {}

    def trainer(name: str, strategy: str = "every_save", **options):
        defaults = {"target_hub_id": "alice/target", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        return make_trainer(
            folder / name,
            target=target,
            eval_dataset=make_dataset(5, seed=2),
            push_to_hub=True,
            hub_model_id=f"alice/{name}",
            hub_strategy=strategy,
            # The default, but in the options, from where it must not get into a file.
            hub_token=os.environ["HF_TOKEN"],
            hub_always_push=True,
            drafter_options={"target_name_or_path": str(folder / "target")},
            **{**defaults, **options},
        )

    # 1. The whole way, with measurements.
    run = trainer("every_save", eval_strategy="steps", eval_steps=2, acceptance_steps=2, hub_private_repo=True)
    run.train()
    seen["commit"] = str(run.push_to_hub(license="mit", dataset_tags=["alice/completions"]).oid)
    seen["log"] = run.state.log_history

    # 2. Other strategies.
    for strategy in ("checkpoint", "all_checkpoints", "end"):
        run = trainer(strategy, strategy)
        run.train()
    run.save_model()

    # 3. An adapter: what is published is the drafter that it makes.
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    run = trainer("adapter", peft_config=adapter)
    run.train()
    run.push_to_hub()
    seen["adapter"] = dict(run.model.merge_and_unload().to(torch.bfloat16).state_dict())

    # 4. A Hub that refuses, a signal, a target without a name.
    run = trainer("overloaded")
    run.train()
    seen["steps without a Hub"] = run.state.global_step
    try:
        run.push_to_hub()
    except Exception as error:  # noqa: BLE001 - which one it is, the test says
        seen["push without a Hub"] = repr(error)
    run = trainer("stopped", callbacks=[StopAtFirstStep()])
    try:
        run.train()
    except SystemExit as stop:
        seen["stopped"] = stop.code
    try:
        trainer("unnamed", target_hub_id=str(folder))
    except ValueError as error:
        seen["unnamed"] = str(error)

    # 5. By hand, beside main.
    push_to_hub(
        folder / "every_save", "alice/by_hand", target="alice/target", revision="v2", serving_revision="v2-serving"
    )

    # 6. What was published, as somebody with the package sees it.
    loaded = AutoModel.from_pretrained("alice/every_save")
    seen["with the package"] = type(loaded).__module__, dict(loaded.state_dict())
    card = Path(hf_hub_download("alice/every_save", "README.md")).read_text()
    seen["printed with the package"] = run_card(re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)[0])
    torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
