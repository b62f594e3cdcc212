from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwood.core.target import Target
from tests.study.browser import SIZES, Browser, chromedriver
from tests.study.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_target(tiny_directory: Path) -> Target:
    return Target.from_pretrained(tiny_directory)


@pytest.fixture(scope="session", params=SIZES)
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """A desktop's window and a phone's; for tests marked `needs_browser`."""
    with chromedriver() as driver:
        window = Browser(driver, request.param)
        yield window
        window.close()
