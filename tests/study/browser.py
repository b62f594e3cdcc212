"""A real browser: Debian's chromium, driven by its own chromedriver over W3C's WebDriver protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SIZES = {1280: 900, 390: 844}
"""Heights of the windows, by width: a desktop and a phone."""

LAYOUT = """
  const pictures = [...document.images, ...[...document.querySelectorAll("svg")].filter((one) => one.firstChild)];
  return { window: innerWidth, page: document.documentElement.scrollWidth, pictures: pictures.map((one) => ({
    width: one.getBoundingClientRect().width,
    drawn: one.tagName !== "IMG" || (one.complete && one.naturalWidth > 200) })) };"""

needs_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("chromedriver") is None,
    reason="needs chromium and chromedriver: apt-get install chromium chromium-driver",
)


class Browser:
    """One window.

    Attributes:
        width: of the page's viewport, in CSS pixels.
    """

    def __init__(self, driver: str, width: int) -> None:
        self.width = width
        metrics = {"width": width, "height": SIZES[width], "pixelRatio": 1, "mobile": width < 500}
        options = {
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            "mobileEmulation": {"deviceMetrics": metrics},
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = driver
        opened = self.ask("session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"{driver}/session/{opened['sessionId']}"

    def ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._session}/{path}".rstrip("/"), data, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        """Loads a page, behind what was logged about the one before."""
        self.errors()
        self.ask("url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        return self.ask("execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Clicks as a person does: what is hidden or covered cannot be clicked."""
        (element,) = self.ask("element", {"using": "css selector", "value": selector}).values()
        self.ask(f"element/{element}/click", {})

    def press(self, key: str) -> None:
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.ask("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def errors(self) -> list[str]:
        """Returns what scripts, policies and missing files gave to the console since the last call."""
        return [one["message"] for one in self.ask("se/log", {"type": "browser"}) if one["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("screenshot")))

    def check_layout(self) -> None:
        """Nothing went wrong, the page is no wider than its window, and every picture is drawn."""
        assert self.errors() == []
        found = self.run(LAYOUT)
        assert found["window"] == self.width and found["page"] <= self.width, "the page is wider than its window"
        assert found["pictures"]
        for one in found["pictures"]:
            assert one["drawn"] and one["width"] > 30, one

    def close(self) -> None:
        self.ask("", method="DELETE")


@contextmanager
def chromedriver() -> Iterator[str]:
    """Starts the driver on a free port; gives its address."""
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
