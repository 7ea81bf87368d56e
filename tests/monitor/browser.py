# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""The system's Chromium without a window, driven by playwright, which downloads no browser of its own."""

import shutil
from contextlib import contextmanager


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Sandboxes need rights that a CI container may lack; the other flags keep the browser to itself.
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def launch():
    """Yields a browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser, *, width: int = 1440, height: int = 900, dark: bool = False):
    """Yields a playwright page; errors of its scripts, and requests to others than 127.0.0.1, are in `page.problems`."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    try:
        page = context.new_page()
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (page.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: request.url.startswith("http://127.0.0.1:") or page.problems.append(request.url),
        )
        yield page
    finally:
        context.close()
