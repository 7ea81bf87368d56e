# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The whole way through a real S3 server on loopback: list, tokenize, kill -9, go on, upload, kill -9, go on."""

import gzip
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from s3_server import running_s3

from hf_dflash.data.sources import open_jsonl
from hf_dflash.data.tokenization import tokenize_completions
from hf_dflash.data.tokenize_command import main
from hf_dflash.object_store import ObjectStore


NUM_OBJECTS = 1805
ROWS_PER_OBJECT = 2


def lines_of_object(number):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number} times {row}?"},
                {
                    "role": "assistant",
                    "reasoning_content": f"I multiply {number} by {row}.",
                    "content": f"The product of {number} and {row} is {number * row}, which is the answer.",
                },
            ]
        }
        for row in range(ROWS_PER_OBJECT)
    ]
    lines = [json.dumps(row) for row in rows]
    if number % 100 == 7:
        lines[1] = lines[1][:40]
    return "\n".join(lines).encode()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with running_s3() as url:
        client = boto3.client("s3")
        with ThreadPoolExecutor(4) as pool:
            list(
                pool.map(
                    lambda number: client.put_object(
                        Bucket="bucket", Key=f"completions/part-{number:05d}.jsonl", Body=lines_of_object(number)
                    ),
                    range(NUM_OBJECTS),
                )
            )
        for name in ("_SUCCESS", "failures.jsonl"):
            client.put_object(Bucket="bucket", Key=f"completions/{name}", Body=b"")
        yield url


def run_until_killed(moment, number, arguments):
    """Runs the command in a process of its own, which dies in the middle of its work: see dying_tokenize.py."""
    script = Path(__file__).with_name("dying_tokenize.py")
    done = subprocess.run(
        [sys.executable, str(script), moment, str(number), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def content_of(folder):
    """Files and their content, but for where the sources lie and how often they were looked at."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    for name in ("manifest.json", "skipped.jsonl", "state.json"):
        files.pop(name)
    return files


@pytest.mark.timeout(1800)
def test_a_run_killed_twice_ends_with_the_result_of_one_that_was_not(s3, thinking_target, tmp_path):
    # The same objects as local files, in one go: what must come out.
    local = tmp_path / "local"
    local.mkdir()
    for number in range(NUM_OBJECTS):
        (local / f"part-{number:05d}.jsonl").write_bytes(lines_of_object(number))
    expected = tokenize_completions(
        local, str(thinking_target), tmp_path / "expected", num_workers=1, disable_tqdm=True
    )

    output = tmp_path / "output"
    arguments = [
        "s3://bucket/completions/",
        "--target",
        thinking_target,
        "--output",
        output,
        "--num-workers",
        1,
        "--quiet",
    ]
    run_until_killed("unit", 5, arguments)
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["status"] == "running" and len(manifest["sources"]) == NUM_OBJECTS
    done = {path: path.stat().st_mtime_ns for path in output.glob("unit-*.arrow")}
    assert len(done) == 5 < len(manifest["units"])
    assert list(output.glob("unit-*.arrow.*.partial"))

    # Going on, with another number of workers, and killed again while uploading.
    store = ObjectStore()
    arguments += ["--upload-to", "s3://bucket/tokenized"]
    arguments[arguments.index("--num-workers") + 1] = 2
    run_until_killed("upload", 3, arguments)
    assert len(store.list_objects("s3://bucket/tokenized/")) >= 3
    assert not store.exists("s3://bucket/tokenized/manifest.json")  # its presence says that all is there
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())  # not done again

    assert main(list(map(str, arguments))) == 3  # done; 18 rows were damaged
    assert content_of(output) == content_of(tmp_path / "expected")
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["counts"]["rows"] == NUM_OBJECTS * ROWS_PER_OBJECT
    assert manifest["counts"]["rows_skipped"] == {"bad_json": 18}
    assert len(expected) == NUM_OBJECTS * ROWS_PER_OBJECT - 18
    first = manifest["counts"]["first_skipped"]["bad_json"]
    assert (first["source"], first["line"]) == ("s3://bucket/completions/part-00007.jsonl", 2)

    store.download_folder("s3://bucket/tokenized", tmp_path / "downloaded")
    assert content_of(tmp_path / "downloaded") == content_of(output)
    assert (tmp_path / "downloaded" / "manifest.json").read_bytes() == (output / "manifest.json").read_bytes()


def test_a_compressed_object_is_read_as_the_lines_that_were_compressed(s3):
    boto3.client("s3").put_object(Bucket="bucket", Key="packed/a.jsonl.gz", Body=gzip.compress(lines_of_object(3)))
    with open_jsonl("s3://bucket/packed/a.jsonl.gz") as file:
        assert file.read() == lines_of_object(3)


def test_a_prefix_without_jsonl_and_an_object_that_has_changed_are_errors(s3, thinking_target, tmp_path):
    with pytest.raises(FileNotFoundError, match="s3://bucket/nothing/ holds no object"):
        tokenize_completions("s3://bucket/nothing/", str(thinking_target), tmp_path / "out", disable_tqdm=True)
    source = "s3://bucket/completions/part-00001.jsonl"
    options = {"num_workers": 1, "disable_tqdm": True}
    tokenize_completions(source, str(thinking_target), tmp_path / "one", **options)
    boto3.client("s3").put_object(Bucket="bucket", Key=source.removeprefix("s3://bucket/"), Body=lines_of_object(9))
    with pytest.raises(ValueError, match=f"changed source: {source}"):
        tokenize_completions(source, str(thinking_target), tmp_path / "one", **options)
