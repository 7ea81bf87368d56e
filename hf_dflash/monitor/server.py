# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""`hf-dflash monitor OUTPUT_DIR`: the page of a run that is live, finished, or was copied from elsewhere.

Read-only. It serves three files and one JSON document, all known by name, so no path of a request ever reaches the disk. It
answers only its own page: not other sites (Origin, Sec-Fetch-Site), not names that were made to point here (Host).
"""

import argparse
import ipaddress
import sys
from collections.abc import Iterable
from pathlib import Path

from ..command_line import CommandParser
from .history import RunHistory


try:
    import orjson
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError("The monitor needs a web server: `pip install 'hf-dflash[monitor]'`.") from error

PAGE = Path(__file__).with_name("page")
PORT = 7860

# Of a log that is opened, as much as can be read while a page waits; then it shows that much, and asks again.
_SLICE_BYTES = 24 << 20

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(history: RunHistory, host_names: Iterable[str] = ()) -> ASGIApp:
    """
    Args:
        history ([`RunHistory`]): the run to show.
        host_names (`Iterable[str]`, *optional*): names, beside `localhost` and IP addresses, by which browsers may ask.

    Returns:
        An ASGI application.
    """

    async def data(request: Request) -> Response:
        try:
            seen = {
                name: int(request.query_params.get(name, default))
                for name, default in (("generation", -1), ("first_bucket", 0), ("events_version", -1))
            }
        except ValueError:
            return PlainTextResponse("Numbers are wanted.", 400)
        try:
            await run_in_threadpool(history.update, _SLICE_BYTES)
        except FileNotFoundError as error:
            return Response(orjson.dumps({"error": str(error)}), 404, media_type="application/json")
        content = await run_in_threadpool(
            lambda: orjson.dumps(history.snapshot(**seen), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        )
        return Response(content, media_type="application/json")

    def file(name: str, media_type: str):
        async def respond(request: Request) -> Response:
            return FileResponse(PAGE / name, media_type=media_type)

        return respond

    routes = [
        Route("/", file("index.html", "text/html")),
        Route("/monitor.css", file("monitor.css", "text/css")),
        Route("/monitor.js", file("monitor.js", "text/javascript")),
        Route("/data", data),
    ]
    return OnlyOwnPage(Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)]), host_names)


class OnlyOwnPage:
    """
    Refuses what the page itself would never ask, and tells the browser to do so too.

    Args:
        app (`ASGIApp`): what is protected.
        host_names (`Iterable[str]`): see [`create_app`].
    """

    def __init__(self, app: ASGIApp, host_names: Iterable[str]):
        self.app = app
        self.host_names = {"localhost", *(name.lower() for name in host_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # No WebSockets here: uvicorn answers 403.
            await send({"type": "websocket.close"})
            return

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            await send(message)

        refusal = self.find_refusal(scope)
        app = self.app if refusal is None else PlainTextResponse(refusal, 403)
        await app(scope, receive, send_with_headers)

    def find_refusal(self, scope: Scope) -> str | None:
        """Why a request is refused, `None` if it is not."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == "host"]
        if len(hosts) != 1 or not self._is_own(hosts[0]):
            return "Unknown host name: give it to `hf-dflash monitor` as --allow_host."
        for name, value in headers:
            if name == "origin" and value.lower() not in (f"http://{hosts[0].lower()}", f"https://{hosts[0].lower()}"):
                return "Requests from other sites are refused."
            if name == "sec-fetch-site" and value not in ("same-origin", "none"):
                # A link that somebody follows to the page is no harm; data that another site asks for is.
                is_visit = scope["path"] == "/" and ("sec-fetch-mode", "navigate") in headers
                if not is_visit:
                    return "Requests from other sites are refused."
        return None

    def _is_own(self, host: str) -> bool:
        """An IP address cannot be made to point elsewhere; a name can, unless it is a known one."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.lower().removesuffix(".")
        if name in self.host_names:
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True


def main(argv: list[str] | None = None) -> int:
    """`hf-dflash monitor`."""
    parser = CommandParser(
        prog="hf-dflash monitor",
        description="The page of a training run: live, finished, or copied from elsewhere. Reads the run's folder only.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("output_dir", type=Path, help="the run's --output_dir")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; other than this one, anybody can look"
    )
    parser.add_argument("--port", type=int, default=PORT, help="0 for any free one")
    parser.add_argument(
        "--allow_host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names, beside localhost, by which browsers may ask",
    )
    args = parser.parse_args(argv)
    if not args.output_dir.is_dir():
        raise FileNotFoundError(f"There is no folder {args.output_dir}.")
    history = RunHistory(args.output_dir)
    # What is no run is an error here, not an empty page.
    history.update(0)

    app = create_app(history, [args.host, *args.allow_host])
    config = uvicorn.Config(app, args.host, args.port, log_level="warning", server_header=False, ws="none")
    server = Announced(config, args.output_dir)
    server.run()
    return 0 if server.started else 1


class Announced(uvicorn.Server):
    """Says where the page is once it can be opened."""

    def __init__(self, config: uvicorn.Config, folder: Path):
        super().__init__(config)
        self.folder = folder

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"{self.folder}: {address}  (Ctrl+C ends the page, not the run)", flush=True)
        try:
            is_here = ipaddress.ip_address(host).is_loopback
        except ValueError:
            is_here = False
        if not is_here:
            print("Anybody who reaches this address can look at the run; there is no password.", file=sys.stderr)
