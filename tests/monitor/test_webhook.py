# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_training import heard_by_pytest

from hf_dflash.monitor.webhook import Webhook


@pytest.fixture
def receiver():
    """A server that keeps what it is sent; it answers with its `status` once `may_answer` is set."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.received.append((self.headers["Content-Type"], json.loads(content)))
            self.server.may_answer.wait(30)
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.received, server.status, server.may_answer = [], 200, threading.Event()
    server.may_answer.set()
    server.url = f"http://127.0.0.1:{server.server_port}/secret-token"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.may_answer.set()
    server.shutdown()


def test_alerts_arrive_in_order_as_json(receiver):
    webhook = Webhook(receiver.url)
    for step in range(3):
        webhook.send({"text": "x", "step": step})
    webhook.close()
    assert receiver.received == [("application/json", {"text": "x", "step": step}) for step in range(3)]


def test_a_receiver_that_refuses_is_warned_about_once_without_its_address(receiver, caplog):
    receiver.status = 500
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        webhook = Webhook(receiver.url)
        webhook.send({"step": 1})
        webhook.send({"step": 2})
        webhook.close()
    assert len(receiver.received) == 2
    assert caplog.text.count("does not take alerts") == 1
    assert "secret-token" not in caplog.text


def test_nobody_listens_and_nothing_is_raised(caplog):
    with caplog.at_level(logging.WARNING), heard_by_pytest():
        webhook = Webhook("http://127.0.0.1:9/none")
        webhook.send({"step": 1})
        webhook.close()
    assert "training goes on" in caplog.text


def test_a_receiver_that_hangs_holds_up_nobody(receiver):
    receiver.may_answer.clear()
    webhook = Webhook(receiver.url, timeout=0.2)
    # More than the queue holds: what is too much is dropped, not waited for.
    for step in range(1000):
        webhook.send({"step": step})
    webhook.close()
    assert len(receiver.received) <= 101
