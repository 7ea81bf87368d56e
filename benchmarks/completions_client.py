# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""What the client of `hf-dflash generate --server` costs by itself: many small prompts against a server that answers at once.

    python benchmarks/completions_client.py --rows 100000

Prints, as JSON, the processor time of the client per request, its memory at a tenth of the rows and at the end, and for
comparison the processor time of nothing but the HTTP requests (aiohttp, same server, same bodies, same concurrency).
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_chat_server import fake_chat_server  # noqa: E402

from hf_dflash.data import server_completions  # noqa: E402


def resident_mib() -> float:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure_client(url: str, prompts: Path, output: Path, concurrency: int) -> dict:
    memory: dict[int, float] = {}

    class MeasuredFolder(server_completions.CompletionFolder):
        def add(self, row, replies):
            super().add(row, replies)
            if self.totals["rows"] % 10_000 == 0:
                memory[self.totals["rows"]] = round(resident_mib(), 1)

    server_completions.CompletionFolder = MeasuredFolder
    wall, cpu = time.perf_counter(), time.process_time()
    manifest = server_completions.generate_completions_from_servers(
        prompts, output, [url], concurrency=concurrency, limits=None, disable_tqdm=True
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rows = manifest["counts"]["rows"]
    return {
        "rows": rows,
        "failed": manifest["counts"]["failed"],
        "rows_per_s": round(rows / wall),
        "client_ms_per_request": round(cpu / rows * 1e3, 3),
        "resident_mib_by_rows": memory,
    }


async def _send(url: str, bodies: list[bytes], concurrency: int) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        remaining = iter(bodies)

        async def ask():
            for body in remaining:
                async with session.post(
                    f"{url}/chat/completions", data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()

        await asyncio.gather(*(ask() for _ in range(concurrency)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, fake_chat_server() as url:
        prompts = Path(folder) / "prompts.jsonl"
        with open(prompts, "w") as file:
            for number in range(arguments.rows):
                text = f"Question {number}: " + "what is the sum of these numbers? " * 8
                row = {"id": f"row-{number}", "source": "synthetic", "messages": [{"role": "user", "content": text}]}
                file.write(json.dumps(row) + "\n")
        result = measure_client(url, prompts, Path(folder) / "out", arguments.concurrency)

        count = min(arguments.rows, 10_000)
        with open(prompts) as file:
            rows = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
        bodies = [json.dumps({"messages": row["messages"], "return_token_ids": True}).encode() for row in rows]
        cpu = time.process_time()
        asyncio.run(_send(url, bodies, arguments.concurrency))
        result["bare_http_ms_per_request"] = round((time.process_time() - cpu) / count * 1e3, 3)
    result["ratio"] = round(result["client_ms_per_request"] / result["bare_http_ms_per_request"], 2)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
