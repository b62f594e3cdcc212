"""What a measurement must say about where it was made."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..core.target import Target


def environment(target: Target) -> dict[str, Any]:
    """Returns versions, commit, machine, device, threads and date (UTC)."""
    device = target.device
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_fixed(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "attention": str(getattr(target.model.config, "_attn_implementation", "")),
    }


def default_device() -> str | None:
    """Returns this process's own accelerator, by the LOCAL_RANK that launchers set; None for the CPU."""
    if not torch.cuda.is_available():
        return None
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def launched() -> tuple[int, int]:
    """Returns this process's rank and how many there are, as launchers say it."""
    for rank, size in _LAUNCHERS:
        if size in os.environ:
            return int(os.environ.get(rank, "0")), int(os.environ[size])
    return 0, 1


_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),  # torchrun, accelerate
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@cache
def _fixed() -> dict[str, Any]:
    packages = ("torch", "transformers", "draftwood")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "commit": _commit(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


class PeakMemory:
    """The most memory in use from now on: of the accelerator, or of this whole process on a CPU under Linux.

    Args:
        device: where the target is.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        else:
            self._resets = _reset_resident_peak()

    def read(self) -> int | None:
        """Returns bytes; None where the system does not say."""
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda)
        return _resident_peak() if self._resets else None


def _reset_resident_peak() -> bool:
    """Resets the kernel's high-water mark of this process; says whether there is one."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this package runs from, `-dirty` if files differ from it; None if installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root)]
    try:
        described = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def _processor() -> str:
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file():
        for line in cpu.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
