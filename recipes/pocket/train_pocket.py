# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Makes the pocket target: tokenizer, training, its own greedy completions, the shipped folder.

Four phases; each reads what the one before left in `--work`, and is skipped or resumed when its output is there:

    python recipes/pocket/make_corpus.py --work .pocket             # corpus.jsonl.gz (functions)
    python recipes/pocket/make_tasks.py  --work .pocket             # tasks.jsonl.gz  (chores)
    python recipes/pocket/train_pocket.py tokenize --work .pocket   # tokenizer/, tokens.npz           (CPU, a minute)
    python recipes/pocket/train_pocket.py train    --work .pocket   # checkpoint.pt, then model/       (one GPU, minutes)
    python recipes/pocket/train_pocket.py generate --work .pocket   # completions_{train,heldout}.jsonl.gz (GPU or CPU)
    python recipes/pocket/train_pocket.py export   --work .pocket   # copies what is shipped beside this script

`train` and `generate` need no `flash-linear-attention`, and `generate` refuses it: the completions are those of the
plain torch reference in float32 (left-padded rows, TF32 off), as a laptop computes them. `generate` keeps every
completion; `export` ships those that neither run into a loop nor fail to render back, and writes down what was left out.
"""

import argparse
import gzip
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig


HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 3072
NUM_RESERVED = 8  # rows that nothing ever uses: a drafter's mask token takes one
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPLITS = ("train", "prompts", "heldout")
MAX_LENGTH = 384
MAX_NEW_TOKENS = 288
MAX_REPEATED_SHARE = 0.4  # of a completion's 4-grams; above it, the completion is a loop and is not shipped


# ---------------------------------------------------------------- tokenize


def read_corpus(work: Path) -> list[dict]:
    rows = []
    for name in ("corpus.jsonl.gz", "tasks.jsonl.gz"):
        with gzip.open(work / name, "rt", encoding="utf-8") as file:
            rows += [json.loads(line) for line in file]
    for row in rows:
        row.setdefault("answer", f"```python\n{row.get('code')}\n```")
    return rows


def conversation(row: dict) -> list[dict]:
    thinking = row["plan"] if row["thinks"] else ""
    answer = {"role": "assistant", "reasoning_content": thinking, "content": row["answer"]}
    return [{"role": "user", "content": row["question"]}, answer]


def train_tokenizer(rows: list[dict]):
    """A BPE with the pre-tokenizer of the reference architecture's own tokenizer, and the special tokens at the end."""
    from tokenizers import models, trainers
    from transformers import Qwen3_5Tokenizer

    specials = [PAD, START, END, "<think>", "</think>"] + [f"<|reserved_{i}|>" for i in range(NUM_RESERVED)]
    bare = Qwen3_5Tokenizer().backend_tokenizer
    bare.model = models.BPE()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(specials),
        initial_alphabet=sorted(_byte_alphabet()),
        show_progress=True,
    )
    bare.train_from_iterator((f"{row['question']}\n{row['plan']}\n{row['answer']}\n" for row in rows), trainer)
    state = json.loads(bare.to_str())["model"]
    tokenizer = Qwen3_5Tokenizer(
        vocab=state["vocab"],
        merges=[tuple(merge) for merge in state["merges"]],
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [s for s in specials if "think" not in s]})
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = 2048
    return tokenizer


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel.alphabet()


def tokenize(work: Path) -> None:
    rows = read_corpus(work)
    tokenizer = train_tokenizer([row for row in rows if row["split"] == "train"])
    tokenizer.save_pretrained(work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    ids, starts, prompt_lengths, splits, dropped = [], [0], [], [], 0
    for row in tqdm(rows, desc="tokenize", unit="row"):
        chat = conversation(row)
        prompt = tokenizer.apply_chat_template(
            chat[:1], tokenize=False, add_generation_prompt=True, enable_thinking=row["thinks"]
        )
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert whole.startswith(prompt) and whole.endswith(END + "\n"), whole
        prompt_ids = tokenizer(prompt)["input_ids"]
        whole_ids = tokenizer(whole.removesuffix("\n"))["input_ids"]
        assert whole_ids[: len(prompt_ids)] == prompt_ids, whole
        if len(whole_ids) > MAX_LENGTH:
            dropped += 1
            continue
        ids.extend(whole_ids)
        starts.append(len(ids))
        prompt_lengths.append(len(prompt_ids))
        splits.append(SPLITS.index(row["split"]))
    arrays = {"ids": np.array(ids, np.uint16), "starts": np.array(starts, np.int32)}
    arrays |= {"prompt_lengths": np.array(prompt_lengths, np.int16), "splits": np.array(splits, np.int8)}
    np.savez_compressed(work / "tokens.npz", **arrays)
    answers = np.diff(arrays["starts"]) - arrays["prompt_lengths"]
    print(
        f"vocabulary {len(tokenizer)}, {len(splits)} rows ({dropped} longer than {MAX_LENGTH} dropped), {len(ids)} tokens"
    )
    print("answer tokens: mean", answers.mean().round(1), "percentiles 5/50/95", np.percentile(answers, [5, 50, 95]))
    asked = answers[arrays["splits"] == SPLITS.index("prompts")]
    print("answer tokens of what is asked: mean", asked.mean().round(1), "sum", asked.sum())


# ------------------------------------------------------------------- train


def create_model(tokenizer) -> Qwen3_5ForCausalLM:
    eos = tokenizer.convert_tokens_to_ids(END)
    pad = tokenizer.convert_tokens_to_ids(PAD)
    rope = {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [3, 3, 2]
    }  # fmt: skip
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=320, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=1, head_dim=64, max_position_embeddings=2048,
        linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        tie_word_embeddings=True, rope_parameters=rope, eos_token_id=eos, pad_token_id=pad,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[eos, pad], pad_token_id=pad, do_sample=False)
    return model


def shifted_causal_conv1d(hidden_states, weight, bias=None, activation=None, **kwargs):
    """The depthwise causal convolution as four shifted products: on a GPU, several times quicker to train through."""
    taps = weight.shape[-1]
    length = hidden_states.shape[-1]
    padded = F.pad(hidden_states, (taps - 1, 0))
    weight = weight.to(hidden_states.dtype)
    out = sum(padded[..., k : k + length] * weight[:, k, None] for k in range(taps))
    return F.silu(out)


class Rows:
    """All rows on one device, batched by a token budget (rows x longest), similar lengths together."""

    def __init__(self, work: Path, split: str, device: str):
        data = np.load(work / "tokens.npz")
        chosen = np.flatnonzero(data["splits"] == SPLITS.index(split))
        self.starts = data["starts"][:-1][chosen].astype(np.int64)
        self.lengths = np.diff(data["starts"])[chosen].astype(np.int64)
        self.prompts = data["prompt_lengths"][chosen].astype(np.int64)
        self.ids = torch.from_numpy(data["ids"].astype(np.int64)).to(device)
        self.device = device

    def batches(self, budget: int, generator: np.random.Generator):
        order = generator.permutation(len(self.lengths))
        pool = max(1, 24 * budget // 128)
        batches = []
        for i in range(0, len(order), pool):
            rows = order[i : i + pool]
            rows = rows[np.argsort(self.lengths[rows], kind="stable")]
            begin = 0
            for end in range(1, len(rows) + 1):
                if end == len(rows) or (end + 1 - begin) * self.lengths[rows[end]] > budget:
                    batches.append(rows[begin:end])
                    begin = end
        generator.shuffle(batches)
        return batches

    def load(self, rows: np.ndarray):
        """-> (input_ids [B, L], index of supervised positions in B * (L - 1), their labels)."""
        length = -(-int(self.lengths[rows].max()) // 16) * 16
        starts, lengths, prompts = (
            torch.from_numpy(x[rows]).to(self.device, non_blocking=True)[:, None]
            for x in (self.starts, self.lengths, self.prompts)
        )
        steps = torch.arange(length, device=self.device)[None]
        inside = steps < lengths
        ids = self.ids[(starts + steps).clamp_(max=len(self.ids) - 1)]
        ids = torch.where(inside, ids, ids.new_zeros(()))
        # The count is known here, so the device is not asked for it: the next step is launched while this one runs.
        count = int((self.lengths[rows] - self.prompts[rows]).sum())
        supervised = torch.nonzero_static((inside & (steps >= prompts))[:, 1:].reshape(-1), size=count)[:, 0]
        return ids, supervised, ids[:, 1:].reshape(-1)[supervised]


def mean_loss(model, rows: Rows, batch: np.ndarray) -> torch.Tensor:
    ids, supervised, labels = rows.load(batch)
    # Right padding and no mask: nothing looks ahead, so real tokens never see padding.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    hidden = hidden[:, :-1].reshape(-1, hidden.shape[-1])[supervised]
    return F.cross_entropy(model.lm_head(hidden).float(), labels)


def evaluate(model, rows: Rows, budget: int, limit: int) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in rows.batches(budget, np.random.default_rng(0))[:limit]:
            tokens = int((rows.lengths[batch] - rows.prompts[batch]).sum())
            total += mean_loss(model, rows, batch).item() * tokens
            count += tokens
    model.train()
    return total / count


def train(work: Path, out: Path, args: argparse.Namespace) -> None:
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    model = create_model(tokenizer).to(device)
    rows, held = Rows(work, "train", device), Rows(work, "prompts", device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    report = {
        "parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "torch": torch.__version__,
        "transformers": transformers.__version__, "batch_tokens": args.batch_tokens, "peak_lr": args.lr,
        "corpus_rows": len(rows.lengths), "corpus_tokens": int(rows.lengths.sum()),
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    reference_conv = modeling_qwen3_5.causal_conv1d_fn
    sample, weight = torch.randn(2, 8, 20), torch.randn(8, 4)
    expected = reference_conv(sample, weight, activation="silu")
    torch.testing.assert_close(shifted_causal_conv1d(sample, weight), expected, atol=1e-5, rtol=1e-5)
    modeling_qwen3_5.causal_conv1d_fn = shifted_causal_conv1d
    report |= learn_corpus(model, optimizer, rows, held, out / "checkpoint.pt", args)
    modeling_qwen3_5.causal_conv1d_fn = reference_conv
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        report["loss_unseen"] = evaluate(model, held, args.batch_tokens, args.eval_batches)
        report["loss_train"] = evaluate(model, rows, args.batch_tokens, args.eval_batches)
    print(json.dumps({k: v for k, v in report.items() if k != "log"}), flush=True)
    model.to(torch.bfloat16).save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    (out / "training.json").write_text(json.dumps(report, indent=1))


def learn_corpus(model, optimizer, rows: Rows, held: Rows, checkpoint: Path, args: argparse.Namespace) -> dict:
    """Next-token training on the answers, linear decay to zero over `--minutes` of wall-clock or `--max_steps`."""
    device = model.device.type
    step, epoch, seen, spent, logs = 0, 0, 0, 0.0, []
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, epoch, seen, spent, logs = (saved[k] for k in ("step", "epoch", "seen", "spent", "logs"))
        print(f"resumed at step {step}, {spent:.0f} s spent")
    begin = time.monotonic() - spent
    saved_at = spent
    bar = tqdm(total=100, desc="train", unit="%", mininterval=5)
    window = torch.zeros((), device=device)
    window_steps, window_tokens, window_begin = 0, 0, time.monotonic()
    done = False
    while not done:
        for batch in rows.batches(args.batch_tokens, np.random.default_rng(epoch)):
            spent = time.monotonic() - begin
            progress = step / args.max_steps if args.max_steps else spent / (args.minutes * 60)
            if progress >= 1:
                done = True
                break
            rate = args.lr * min(1.0, (step + 1) / 150) * (1 - progress)
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                loss = mean_loss(model, rows, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            tokens = int(rows.lengths[batch].sum())
            seen += tokens
            window += loss.detach()
            window_steps += 1
            window_tokens += tokens
            if step in (1, 5, 20) or step % 100 == 0:
                mean = (window / window_steps).item()
                now = time.monotonic()
                entry = {"step": step, "epoch": epoch, "loss": round(mean, 4), "tokens": seen}
                entry |= {
                    "tokens_per_second": round(window_tokens / (now - window_begin)),
                    "seconds": round(now - begin, 1),
                }
                if step % 1000 == 0:
                    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                        entry["loss_unseen"] = round(evaluate(model, held, args.batch_tokens, args.eval_batches), 4)
                logs.append(entry)
                if step < 300 or step % 500 == 0:
                    print(json.dumps(entry), flush=True)
                window.zero_()
                window_steps, window_tokens, window_begin = 0, 0, time.monotonic()
                bar.n = round(100 * progress)
                bar.refresh()
            if spent - saved_at > 60:
                saved_at = spent
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "epoch": epoch,
                }
                partial = checkpoint.with_suffix(".partial")
                torch.save(state | {"seen": seen, "spent": spent, "logs": logs}, partial)
                partial.replace(checkpoint)
        epoch += 1
    bar.close()
    return {"steps": step, "epochs": epoch, "tokens": seen, "seconds": round(spent, 1), "log": logs}


# ---------------------------------------------------------------- generate


def repeated_ngram_share(ids: list[int], n: int = 4) -> float:
    """1 - distinct / all n-grams of one completion."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def completion_row(row: dict, ids: list[int], tokenizer) -> dict:
    stopped = ids[-1] in (tokenizer.convert_tokens_to_ids(END), tokenizer.convert_tokens_to_ids(PAD))
    text = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
    thinking, _, content = text.partition("\n</think>\n\n")
    answer = {"role": "assistant", "reasoning_content": thinking, "content": content}
    return {
        "id": row["id"],
        "messages": [{"role": "user", "content": row["question"]}, answer],
        "finish_reason": "stop" if stopped else "length",
        "completion_token_ids": ids,
    }


def renders_back(row: dict, tokenizer) -> bool:
    """Whether the template turns the parsed conversation into prompt + completion again (the thinking was closed)."""
    prompt = tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return prompt + tokenizer.decode(row["completion_token_ids"]) + "\n" == text


@torch.no_grad()
def greedy_answers(model, tokenizer, rows: list[dict], batch_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """(prompt ids, answer ids with the end of turn), in the order of `rows`; left-padded, similar lengths together."""
    chats = [[{"role": "user", "content": row["question"]}] for row in rows]
    prompts = [
        tokenizer(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True))["input_ids"]
        for c in chats
    ]
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    stops = model.generation_config.eos_token_id
    answers: list[list[int]] = [[] for _ in rows]
    for begin in tqdm(
        range(0, len(order), batch_size), desc="generate", unit="batch", disable=len(order) <= batch_size
    ):
        chosen = order[begin : begin + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [prompts[i] for i in chosen]}, padding_side="left", return_tensors="pt"
        ).to(model.device)
        out = model.generate(**batch, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)[
            :, batch["input_ids"].shape[1] :
        ].tolist()
        for i, ids in zip(chosen, out, strict=True):
            answers[i] = ids[: next((k + 1 for k, token in enumerate(ids) if token in stops), len(ids))]
    return prompts, answers


def summarise(rows: list[dict], tokenizer) -> dict:
    lengths = [len(row["completion_token_ids"]) for row in rows]
    repeats = [repeated_ngram_share(row["completion_token_ids"]) for row in rows]
    grams = [max(0, n - 3) for n in lengths]
    whole = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    same = [
        tokenizer(text.removesuffix("\n"))["input_ids"] == tokenizer(prompt)["input_ids"] + row["completion_token_ids"]
        for text, prompt, row in zip(whole, prompts, rows, strict=True)
    ]
    return {
        "rows": len(rows),
        "tokens": sum(lengths),
        "mean_tokens": round(sum(lengths) / len(rows), 1),
        "length_percentiles_5_50_95": np.percentile(lengths, [5, 50, 95]).tolist(),
        "stopped_share": round(sum(row["finish_reason"] == "stop" for row in rows) / len(rows), 4),
        "repeated_4gram_share": round(sum(r * g for r, g in zip(repeats, grams, strict=True)) / sum(grams), 4),
        "repeated_4gram_share_row_mean": round(float(np.mean(repeats)), 4),
        "rows_above_0.4": round(float(np.mean(np.array(repeats) > 0.4)), 4),
        "distinct_share": round(len({tuple(row["completion_token_ids"]) for row in rows}) / len(rows), 4),
        "retokenized_identically_share": round(sum(same) / len(same), 4),
    }


def generate(work: Path, out: Path, batch_size: int, limit: int | None) -> None:
    if "fla" in sys.modules:
        raise SystemExit("uninstall flash-linear-attention: the completions must be those of the torch reference")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).to(device).eval()
    corpus = read_corpus(work)
    report = {}
    for split, name in (("heldout", "heldout"), ("prompts", "train")):
        asked = [row for row in corpus if row["split"] == split][:limit]
        begin = time.monotonic()
        _, answers = greedy_answers(model, tokenizer, asked, batch_size)
        rows = [completion_row(row, ids, tokenizer) for row, ids in zip(asked, answers, strict=True)]
        with gzip.open(out / f"completions_{name}.jsonl.gz", "wt", encoding="utf-8", compresslevel=9) as file:
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        report[name] = summarise(rows, tokenizer) | {"seconds": round(time.monotonic() - begin, 1)}
        print(name, json.dumps(report[name]), flush=True)
        for row in rows[:: max(1, len(rows) // 4)][:4]:
            print(
                "---", row["messages"][0]["content"], "\n", tokenizer.decode(row["completion_token_ids"]), flush=True
            )
    (out / "completions.json").write_text(json.dumps(report, indent=1))


# ------------------------------------------------------------------ export


def export(out: Path, results: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    for path in sorted((out / "model").iterdir()):
        shutil.copyfile(path, HERE / path.name)
    shares = {}
    for part in ("train", "heldout"):
        with gzip.open(out / f"completions_{part}.jsonl.gz", "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        cut = [row for row in rows if row["finish_reason"] == "length"]
        whole = [row for row in rows if row["finish_reason"] == "stop"]
        calm = [row for row in whole if repeated_ngram_share(row["completion_token_ids"]) <= MAX_REPEATED_SHARE]
        kept = [row for row in calm if renders_back(row, tokenizer)]
        with gzip.open(HERE / f"completions_{part}.jsonl.gz", "wt", encoding="utf-8", compresslevel=9) as file:
            for row in kept:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        left_out = {
            "cut_by_length": len(cut),
            "repeats_itself": len(whole) - len(calm),
            "malformed": len(calm) - len(kept),
        }
        shares[part] = {"left_out": left_out, "all": summarise(rows, tokenizer), "shipped": summarise(kept, tokenizer)}
    training = json.loads((out / "training.json").read_text())
    results.write_text(json.dumps({"training": training, "completions": shares}, indent=1) + "\n")
    sizes = Counter({path.name: path.stat().st_size for path in HERE.iterdir() if path.is_file()})
    print(json.dumps(shares, indent=1))
    print(f"{sum(sizes.values()) / 1e6:.2f} MB in {HERE.name}/:", dict(sizes.most_common()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["tokenize", "train", "generate", "export"])
    parser.add_argument("--work", type=Path, required=True, help="folder with the corpus and the tokens")
    parser.add_argument("--out", type=Path, help="folder for the trained model and completions (default: --work)")
    parser.add_argument("--minutes", type=float, default=2.9, help="wall-clock length of the training schedule")
    parser.add_argument("--max_steps", type=int, help="a schedule of so many steps instead of --minutes")
    parser.add_argument("--batch_tokens", type=int, default=65536)
    parser.add_argument("--eval_batches", type=int, default=10)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch_size", type=int, default=1024, help="rows generated at once")
    parser.add_argument("--limit", type=int, help="generate for so many prompts of each part only")
    args = parser.parse_args()
    out = args.out or args.work
    out.mkdir(parents=True, exist_ok=True)
    if args.phase == "tokenize":
        tokenize(args.work)
    elif args.phase == "train":
        train(args.work, out, args)
    elif args.phase == "generate":
        generate(args.work, out, args.batch_size, args.limit)
    else:
        export(out, HERE.parents[1] / "benchmarks" / "results" / "pocket_training.json")


if __name__ == "__main__":
    main()
