"""Wall-clock time of work that a device may still be busy with."""

import time

import torch


def time_when_done(device: torch.device) -> float:
    """Wait until the device has done its work; return seconds, of which only differences mean anything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
