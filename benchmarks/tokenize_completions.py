# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""
How fast completions become a dataset, how that grows with cores, and whether memory grows with rows.

    python benchmarks/tokenize_completions.py --target TOKENIZER_FOLDER [--rows 200000] [--output results.json]

Measured in one run, on the same generated rows:

- `tokenize_completions` with 1 worker and with 2, on all rows and on a quarter of them; what all rows cost beyond a quarter
  of them is free of start-up (imports and the tokenizer in each process), if a quarter has units of work for all workers
  and outlasts the start-up: it is an error if it does not;
- two runs with 1 worker each at the same time, on half of the rows each: processes that know nothing of one another. What they
  do together is the most that a second core of this machine can give (shared caches and memory, hyperthreads, other users),
  so 2 workers are compared with them;
- the usual way, on a few thousand rows: per row, `apply_chat_template` over the prompt and over the whole conversation,
  the mask from the difference, `Dataset.from_generator`.

Tokens per second are given by the clock and by CPU time. The clock says something on a quiet machine only: of each run the
CPU time of everybody else is measured, as cores, and a run beside more than `--others` of them is done again, up to
`--attempts` times; the one with the fewest counts, and what it had beside it is printed. Peak memory is that of all processes of a run together, sampled; pages that they share count once.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


# The reference job.
REFERENCE_TOKENS = 1_870_000_000
REFERENCE_WORKERS = 128
# Tokens per second of a worker in the run that this is to beat.
REFERENCE_RATE = 37_500

USUAL_WAY_ROWS = 3_000


def write_rows(path: Path, count: int, words_per_reply: int) -> None:
    """Conversations with thinking, of words and punctuation in the frequencies of the standard library's docstrings."""
    words = []
    for module in (
        "argparse",
        "asyncio",
        "collections",
        "csv",
        "datetime",
        "decimal",
        "email",
        "http",
        "json",
        "logging",
    ):
        text = __import__(module).__doc__ or ""
        words += text.split()
    for module in (argparse, json, random, subprocess, tempfile, threading):
        words += Path(module.__file__).read_text().split()
    generator = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            length = max(8, int(generator.lognormvariate(0, 0.6) * words_per_reply))
            start = generator.randrange(len(words))
            text = [words[(start + step * 7 + number) % len(words)] for step in range(length)]
            cut = length * 3 // 4
            message = {"role": "assistant", "reasoning_content": " ".join(text[:cut]), "content": " ".join(text[cut:])}
            question = f"Question {number}: " + " ".join(words[start : start + 20])
            row = {"messages": [{"role": "user", "content": question}, message], "finish_reason": "stop"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def run_ours(sources: list[str], target: str, workers: int) -> dict:
    """A run for each source, all at the same time and in processes of their own, with what they took together."""
    with tempfile.TemporaryDirectory() as folder:
        processes, begin, busy = [], time.perf_counter(), busy_seconds()
        for number, source in enumerate(sources):
            output = Path(folder, str(number))
            output.mkdir()
            command = [sys.executable, __file__, "--target", target, "--child", source, str(output), str(workers)]
            # Each waits for a line before it tokenizes, so that they begin together.
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
                )
            )
        peak, cpu = 0, {}

        def watch():
            nonlocal peak
            sample = 0
            while any(process.poll() is None for process in processes):
                # Adding up memory takes a few percent of a core, and holds up a process that asks for more meanwhile.
                pids = [found for process in processes for found in processes_of(process.pid)]
                cpu.update(pids)
                if sample % 10 == 0:
                    peak = max(peak, sum(memory_of(pid) for pid, _ in pids))
                sample += 1
                time.sleep(0.1)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for process in processes:
            process.stdout.readline()
        start_up = time.perf_counter() - begin
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        outputs = [process.communicate()[0] for process in processes]
        elapsed, busy = time.perf_counter() - begin, busy_seconds() - busy
        watcher.join()
        if any(process.returncode for process in processes):
            raise SystemExit(f"tokenizing {', '.join(sources)} failed")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "rows": sum(result["rows"] for result in results),
        "tokens": sum(result["tokens"] for result in results),
        "units": sum(result["units"] for result in results),
        "seconds": max(result["seconds"] for result in results),
        "start_up_seconds": start_up,
        "workers": workers * len(sources),
        "cpu_seconds": sum(cpu.values()) - sum(result["start_cpu"] for result in results),
        "peak_bytes": peak,
        "cores_of_others": max(0.0, busy - sum(cpu.values())) / elapsed,
    }


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have had, but for this one, which only watches."""
    user, nice, system, _idle, _wait, *interrupts = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK") - time.process_time()


def processes_of(session: int) -> list[tuple[str, float]]:
    """(pid, CPU seconds) of all processes of a session."""
    ticks, found = os.sysconf("SC_CLK_TCK"), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session:
            found.append((pid, sum(map(int, fields[11:13])) / ticks))
    return found


def memory_of(pid: str) -> int:
    """Bytes of memory of a process. Of a page that n processes share, 1/n is counted."""
    try:
        return 1024 * int(re.search(r"^Pss:\s+(\d+)", Path("/proc", pid, "smaps_rollup").read_text(), re.M)[1])
    except (OSError, TypeError):
        return 0  # it has just ended


def child(source: str, target: str, folder: str, workers: int) -> None:
    from hf_dflash.data.tokenization import tokenize_completions

    tokenizer = load_tokenizer(target)
    import datasets  # noqa: F401

    print("ready", flush=True)
    sys.stdin.readline()
    start_cpu, start = time.process_time(), time.perf_counter()
    options = {"num_workers": workers, "gates": None, "disable_tqdm": True}
    dataset = tokenize_completions(source, tokenizer, Path(folder, "dataset"), **options)
    seconds = time.perf_counter() - start
    manifest = json.loads(Path(folder, "dataset", "manifest.json").read_text())
    counts = manifest["counts"]
    assert counts["rows"] == counts["samples"] == len(dataset)
    result = {"rows": counts["rows"], "tokens": counts["tokens"], "units": len(manifest["units"])}
    print(json.dumps({**result, "seconds": seconds, "start_cpu": start_cpu}))


def run_usual_way(source: str, target: str) -> dict:
    from datasets import Dataset

    tokenizer = load_tokenizer(target)

    def rows():
        with open(source, encoding="utf-8") as file:
            for _, line in zip(range(USUAL_WAY_ROWS), file, strict=False):
                messages = json.loads(line)["messages"]
                prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
                ids = tokenizer.apply_chat_template(messages)["input_ids"]
                yield {"input_ids": ids, "loss_mask": [int(place >= len(prompt)) for place in range(len(ids))]}

    with tempfile.TemporaryDirectory() as folder:
        start, start_cpu = time.perf_counter(), time.process_time()
        dataset = Dataset.from_generator(rows, cache_dir=folder)
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        return {
            "rows": len(dataset),
            "tokens": sum(map(len, dataset["input_ids"])),
            "seconds": seconds,
            "cpu_seconds": cpu,
        }


def load_tokenizer(target: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def beyond(more: dict, less: dict, time_of: str) -> float:
    """Tokens per second of what a run does beyond a smaller one."""
    return (more["tokens"] - less["tokens"]) / (more[time_of] - less[time_of])


def median_of(runs: list[dict]) -> dict:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def rates(run: dict) -> str:
    return (
        f"{run['rows'] / run['seconds']:>9,.0f} {run['tokens'] / run['seconds']:>11,.0f} "
        f"{run['tokens'] / run['cpu_seconds']:>13,.0f}"
    )


def check_that_start_up_cancels(less: dict) -> None:
    """Both workers must have been at work in the smaller run, or the larger one has start-up beyond it."""
    if less["units"] < 4 * less["workers"] or less["seconds"] < less["start_up_seconds"]:
        raise SystemExit(
            f"A quarter of the rows is {less['units']} units for {less['workers']} workers and took {less['seconds']:.1f} s, "
            f"beside {less['start_up_seconds']:.1f} s in which a process starts: give more --rows."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, help="folder with a tokenizer and its chat template")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=1, help="of all runs, in turn; medians are taken (%(default)s)")
    parser.add_argument(
        "--others", type=float, default=0.1, help="cores that others may use beside a run (%(default)s)"
    )
    parser.add_argument("--attempts", type=int, default=1, help="at a run beside fewer (%(default)s)")
    parser.add_argument("--words", type=int, default=150, help="median words of a reply (%(default)s)")
    parser.add_argument("--output", help="write the results there as JSON")
    parser.add_argument("--child", nargs=3, metavar=("SOURCE", "FOLDER", "WORKERS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if arguments.child:
        source, folder, workers = arguments.child
        child(source, arguments.target, folder, int(workers))
        return

    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for share in (1, 2, 4, 8):
            files[share] = str(Path(folder, f"{share}.jsonl"))
            write_rows(Path(files[share]), arguments.rows // share, arguments.words)
        everything = files[1]
        plans = {
            "1 worker, a quarter of the rows": ([files[4]], 1),
            "1 worker": ([files[1]], 1),
            "2 workers, a quarter of the rows": ([files[4]], 2),
            "2 workers": ([files[1]], 2),
            "2 runs apart, a quarter of the rows": ([files[8]] * 2, 1),
            "2 runs apart": ([files[2]] * 2, 1),
        }
        repeats = {name: [] for name in plans}
        for number in range(arguments.repeats):
            for name, (sources, workers) in plans.items():
                attempts = []
                for _ in range(arguments.attempts):
                    attempts.append(run_ours(sources, arguments.target, workers))
                    seconds, others = attempts[-1]["seconds"], attempts[-1]["cores_of_others"]
                    print(f"repeat {number + 1}, {name}: {seconds:.1f} s beside {others:.2f} cores", file=sys.stderr)
                    if others <= arguments.others:
                        break
                repeats[name].append(min(attempts, key=lambda run: run["cores_of_others"]))
        runs = {name: median_of(found) for name, found in repeats.items()}
        check_that_start_up_cancels(runs["2 workers, a quarter of the rows"])
        usual = run_usual_way(everything, arguments.target)

    tokenizer = load_tokenizer(arguments.target)
    one, one_less, two, two_less, apart, apart_less = (
        runs[f"{workers}{part}"]
        for workers in ("1 worker", "2 workers", "2 runs apart")
        for part in ("", ", a quarter of the rows")
    )
    print(
        f"{type(tokenizer).__name__}, {len(tokenizer)} ids; load of the machine {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(
        f"{'':<36}{'rows':>9}{'units':>6}{'seconds':>9}{'rows/s':>10}{'tokens/s':>12}{'tokens/CPU-s':>14}{'peak memory':>13}{'others':>8}"
    )
    for name, run in runs.items():
        print(
            f"{name:<36}{run['rows']:>9,}{run['units']:>6,.0f}{run['seconds']:>9.1f} {rates(run)} {run['peak_bytes'] / 2**20:>8,.0f} MiB{run['cores_of_others']:>8.2f}"
        )
    print(f"{'the usual way, 1 process':<36}{usual['rows']:>9,}{'':>6}{usual['seconds']:>9.1f} {rates(usual)}")

    rate = beyond(one, one_less, "cpu_seconds")
    scaling = beyond(two, two_less, "cpu_seconds") / rate
    seconds = REFERENCE_TOKENS / (REFERENCE_WORKERS * rate * scaling)
    summary = {
        "tokens per CPU-second of 1 worker, beyond start-up": rate,
        "tokens per CPU-second of 2 workers, beyond start-up": rate * scaling,
        "ratio to the usual way (tokens per CPU-second)": rate / (usual["tokens"] / usual["cpu_seconds"]),
        "ratio to the reference run's worker (37.5K tokens/s)": rate / REFERENCE_RATE,
        "speed-up of 2 workers by the clock, beyond start-up": beyond(two, two_less, "seconds")
        / beyond(one, one_less, "seconds"),
        "the same of 2 runs apart: what the machine's second core gives": beyond(apart, apart_less, "seconds")
        / beyond(one, one_less, "seconds"),
        "speed-up of 2 workers by the clock, all rows, with start-up": one["seconds"] / two["seconds"],
        "ratio of 2 workers to 2 runs apart by the clock": beyond(two, two_less, "seconds")
        / beyond(apart, apart_less, "seconds"),
        "ratio of 2 workers to 2 runs apart by CPU time": beyond(two, two_less, "cpu_seconds")
        / beyond(apart, apart_less, "cpu_seconds"),
        "peak memory of 1 worker, all rows to a quarter of them": one["peak_bytes"] / one_less["peak_bytes"],
        "peak memory of 2 workers, all rows to a quarter of them": two["peak_bytes"] / two_less["peak_bytes"],
        "reference job on 128 workers, seconds (extrapolated)": seconds,
    }
    print()
    for name, value in summary.items():
        print(f"{name:<66}{value:>12,.2f}")
    print(
        f"\nExtrapolation: {REFERENCE_TOKENS / 1e9:.2f}B tokens / ({REFERENCE_WORKERS} workers x {rate:,.0f} tokens per CPU-second "
        f"x {scaling:.2f}, what stays of it with a second worker). Workers share nothing but the list of units, so the "
        "loss per\nworker does not grow with their number as long as source and disk keep up "
        f"({4 * REFERENCE_TOKENS / seconds / 1e9:.1f} GB/s of text at that speed); start-up of the processes "
        f"({two['start_up_seconds']:.0f} s here) comes on top, and at the end a worker waits for at most one of the smallest units."
    )
    if arguments.output:
        result = {
            "runs": runs,
            "usual way": usual,
            "summary": summary,
            "load": os.getloadavg(),
            "cores": os.cpu_count(),
            "repeats": arguments.repeats,
        }
        result["tokenizer"] = {"class": type(tokenizer).__name__, "size": len(tokenizer)}
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
