"""The processes that a launcher started: which accelerator of accelerate's they share the work through."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator


def launched() -> bool:
    """Whether `accelerate launch`, torchrun or another launcher started this process."""
    return "LOCAL_RANK" in os.environ


def make_accelerator(*, on_cpu: bool = False) -> Accelerator:
    """Returns an accelerator of the launcher's settings.

    Args:
        on_cpu: whether the weights are on the CPU; a single process then stays there. Launched ones each go to a device
            of their own, where there are any.
    """
    # Without being told, accelerate takes processes that torchrun starts on a CPU for strangers to each other.
    return Accelerator(cpu=not torch.accelerator.is_available() or (on_cpu and not launched()))
