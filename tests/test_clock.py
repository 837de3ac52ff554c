"""Times are taken after the device has done its work."""

import time

import torch

from margrpo.clock import time_when_done


def test_a_gpu_is_waited_for(monkeypatch):
    waited_for = []

    def wait(device):
        waited_for.append(device)
        time.sleep(0.01)

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    gpu = torch.device("cuda", 1)
    before = time.perf_counter()
    assert time_when_done(gpu) >= before + 0.01
    assert waited_for == [gpu]


def test_a_cpu_needs_no_waiting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    before = time.perf_counter()
    assert before <= time_when_done(torch.device("cpu")) <= time.perf_counter()
