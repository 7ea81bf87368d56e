# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The monitor of a folder, served in a thread by the real server."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from hf_dflash.monitor.history import RunHistory
from hf_dflash.monitor.server import create_app


@contextmanager
def serve(folder, host_names=()):
    """Yields the port and the [`RunHistory`] behind it."""
    history = RunHistory(folder)
    config = uvicorn.Config(create_app(history, host_names), "127.0.0.1", 0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], history
    finally:
        server.should_exit = True
        thread.join()
