# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import http.client
import json
import signal
import subprocess
import sys

import pytest
from logs import BEGIN, training_rows, write_rows
from serving import serve

from hf_dflash import cli


SECRET = "the content of a file outside"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`get(path, **headers)` of a short run; beside its folder lies a secret."""
    root = tmp_path_factory.mktemp("served")
    (root / "secret.txt").write_text(SECRET)
    folder = root / "run"
    folder.mkdir()
    (folder / "secret.txt").write_text(SECRET)
    write_rows(folder, [BEGIN, *training_rows(1, 5, loss=float)])
    with serve(folder, ["a-known-name"]) as (port, history):

        def get(path, method="GET", host=f"127.0.0.1:{port}", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            # As it is: a client of ours would tidy up the path.
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if host is not None:
                connection.putheader("Host", host)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            answer.content = answer.read()
            connection.close()
            return answer

        get.port, get.history = port, history
        yield get


def test_the_page_its_files_and_the_data_are_served(served):
    for path, kind in (("/", "text/html"), ("/monitor.css", "text/css"), ("/monitor.js", "text/javascript")):
        answer = served(path)
        assert answer.status == 200 and answer.headers["Content-Type"].startswith(kind)
    answer = served("/data")
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/json"
    assert json.loads(answer.content)["series"]["loss"]["y"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt", "/secret.txt", "/run_log.jsonl", "/..%2fsecret.txt", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
        "/monitor.js/../../secret.txt", "/..\\secret.txt", "/data/../secret.txt", "/page/../server.py", "/server.py",
        "/%00", "/monitor.js%00.txt", "http://127.0.0.1/etc/passwd", "/data?generation=../../secret.txt", "/data?folder=..",
    ],
)  # fmt: skip
def test_no_path_of_a_request_reaches_the_disk(path, served):
    answer = served(path)
    assert SECRET.encode() not in answer.content and b"root:" not in answer.content
    assert answer.status in (400, 404) or path == "/data?folder=.."


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(method, served):
    for path in ("/", "/data"):
        assert served(path, method, Content_Length="0").status == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", None, "evil:80@x"]
)
def test_a_name_that_was_made_to_point_here_is_refused(host, served):
    answer = served("/data", host=host)
    assert answer.status in (400, 403) and b"loss" not in answer.content


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:1234", "localhost", "LOCALHOST:80", "localhost.:80", "[::1]:80", "10.0.0.5:80", "a-known-name:9"],
)
def test_addresses_and_known_names_are_served_whatever_the_port_of_a_tunnel(host, served):
    assert served("/data", host=host).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"},
    ],
    ids=str,
)
def test_requests_of_other_sites_are_refused_and_never_allowed_to_read(headers, served):
    answer = served("/data", **headers)
    assert answer.status == 403 and b"loss" not in answer.content
    assert "Access-Control-Allow-Origin" not in answer.headers


def test_the_own_page_and_a_link_that_somebody_follows_are_served(served):
    own = f"http://127.0.0.1:{served.port}"
    assert served("/data", Origin=own, Sec_Fetch_Site="same-origin").status == 200
    assert served("/data", Sec_Fetch_Site="none").status == 200
    assert served("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200


@pytest.mark.parametrize(
    "path, host", [("/", "localhost"), ("/data", "localhost"), ("/none", "localhost"), ("/", "evil.example")]
)
def test_every_answer_forbids_scripts_frames_and_guessing(path, host, served):
    headers = served(path, host=host).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["Cache-Control"] == "no-store"


def test_the_page_asks_nobody_else(served):
    for path in ("/", "/monitor.js", "/monitor.css"):
        text = served(path).content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text and "innerHTML" not in text and "eval(" not in text


def test_a_page_that_stays_open_reads_a_long_log_once(tmp_path):
    write_rows(tmp_path, [BEGIN, *training_rows(1, 20_000, loss=float)])
    size = (tmp_path / "run_log.jsonl").stat().st_size
    with serve(tmp_path) as (port, history):

        def ask(query=""):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", f"/data{query}")
            return json.loads(connection.getresponse().read())

        first = ask()
        assert first["step"] == 20_000 and first["read"] == [size, size] and len(first["series"]["loss"]["x"]) <= 1024
        query = f"?generation={first['generation']}&first_bucket={first['next_bucket']}&events_version={first['events_version']}"
        before = history.bytes_read
        for _ in range(5):
            assert len(ask(query)["series"].get("loss", {"x": []})["x"]) <= 1
        assert history.bytes_read == before
        write_rows(tmp_path, training_rows(20_001, 20_010, loss=float), "a")
        assert ask(query)["step"] == 20_010
        assert history.bytes_read - before == (tmp_path / "run_log.jsonl").stat().st_size - size


def test_the_command_serves_without_torch_says_where_the_page_is_and_ends_by_a_signal(tmp_path):
    write_rows(tmp_path, [BEGIN])
    command = [sys.executable, "-X", "importtime", "-m", "hf_dflash.cli", "monitor", str(tmp_path), "--port", "0"]
    with (
        open(tmp_path / "stderr", "w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        line = process.stdout.readline()
        assert f"{tmp_path}: http://127.0.0.1:" in line
        port = int(line.split(":")[-1].split()[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/data")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        errors.seek(0)
        error = errors.read()
    assert "Traceback" not in error
    modules = {line.rpartition("|")[2].strip() for line in error.splitlines()}
    assert "hf_dflash.monitor.history" in modules and not {"torch", "transformers"} & modules


def test_options_are_taken_in_hyphens_too(tmp_path, capsys):
    assert cli.main(["monitor", str(tmp_path / "none"), "--allow-host", "a-name"]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_what_is_no_run_is_a_mistake_in_one_line(tmp_path, capsys):
    assert cli.main(["monitor", str(tmp_path / "none")]) == 2
    assert cli.main(["monitor", str(tmp_path)]) == 2
    first, second = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-dflash monitor: error")
    ]
    assert "There is no folder" in first and "--output_dir" in second
