"""A headless Chromium, driven through chromedriver's own interface (W3C WebDriver), with its console and its requests.

Needs the programs `chromium` and `chromedriver` (Debian: the packages chromium and chromium-driver).
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = "there is no Chromium with its chromedriver here" if CHROMIUM is None or DRIVER is None else ""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """One window. What goes wrong in the driver is an `AssertionError`."""

    def __init__(self, port: int, folder: str, width: int, height: int) -> None:
        self._base = f"http://127.0.0.1:{port}"
        # a page to start with that asks for nothing, as a new tab's own does
        flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        options = {"binary": CHROMIUM, "args": flags}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._send("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._base += f"/session/{made['sessionId']}"
        self._send("POST", "/url", {"url": "about:blank"})
        self.requests()

    def open(self, page: Path) -> None:
        """Opens a file and waits until it is loaded."""
        self._send("POST", "/url", {"url": page.absolute().as_uri()})

    def run(self, script: str, *arguments: object) -> object:
        """What the body of a function gives that runs in the page."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, seconds: float = 10.0) -> object:
        """What the function gives as soon as that is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"never came true: {script}"
            time.sleep(0.05)
        return found

    def act(self, *sequences: dict[str, object]) -> None:
        """Moves pointers and presses keys as a user does (W3C WebDriver, section 17)."""
        self._send("POST", "/actions", {"actions": list(sequences)})

    def enter(self, selector: str) -> None:
        """Goes on inside a frame of the page."""
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", "/frame", {"id": found})

    def console(self) -> list[str]:
        """Warnings and errors since it was asked last."""
        found = self._send("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in found if e["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """Addresses of all that was asked for since it was asked last."""
        found = []
        for entry in self._send("POST", "/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def screenshot(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self._send("GET", "/screenshot"))

    def close(self) -> None:
        self._send("DELETE", "")

    def _send(self, method: str, path: str, data: object = None):  # type: ignore[no-untyped-def]  # whatever JSON holds
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._base + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with _OPENER.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode(errors='replace')[:2000]}") from error


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def browser(width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """A browser with an empty profile, which is gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command: Sequence[str] = [str(DRIVER), f"--port={port}", "--silent"]
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(port)
            opened = Browser(port, folder, width, height)
            try:
                yield opened
            finally:
                with contextlib.suppress(AssertionError, OSError):
                    opened.close()
        finally:
            driver.terminate()
            driver.wait(10)


def _wait(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, "chromedriver does not answer"
            time.sleep(0.05)
