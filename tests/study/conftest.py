from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.core.target import Target
from tests.study.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_target(tiny_directory: Path) -> Target:
    return Target.from_pretrained(tiny_directory)
