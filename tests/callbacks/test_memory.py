"""The memory curve shows the peak of the process."""

import torch

from margrpo.callbacks.memory import PeakMemory, peak_gib


def test_the_peak_is_logged_after_every_rollout_and_never_falls(build):
    before = peak_gib(torch.device("cpu"))
    module, data, trainer = build([PeakMemory()])
    trainer.fit(module, data)
    logged = trainer.logger.curve("memory/peak_gib")
    assert len(logged) == 2
    assert before <= logged[0] <= logged[1] <= peak_gib(torch.device("cpu"))


def test_a_tensor_of_half_a_gib_raises_the_peak_to_what_it_needs():
    held = torch.ones(2**27)
    peak = peak_gib(torch.device("cpu"))
    assert held.sum() == 2**27
    assert 0.5 < peak < 64
