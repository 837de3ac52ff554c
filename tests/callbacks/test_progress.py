"""What the progress bar shows."""

import re

from margrpo.callbacks.progress import StepProgressBar
from margrpo.callbacks.stability import KLTracker


def test_the_bar_counts_optimiser_steps_and_shows_reward_kl_and_heldout_reward(build, capsys):
    options = {"mask_steps_per_update": 1}
    module, data, trainer = build([KLTracker(), StepProgressBar()], steps=4, options=options, enable_progress_bar=True)
    trainer.fit(module, data)
    shown = capsys.readouterr().out
    final = shown.split("\r")[-1]
    assert re.search(r"Step: 100%\|.*\| 4/4 ", final), final
    assert re.search(r"reward=0\.\d+, KL=\S+, held-out=0\.\d+\]", final), final
    kl = float(re.search(r"KL=(\S+),", final)[1])
    assert abs(kl / trainer.callback_metrics["stability/kl"].item() - 1) < 0.01
    assert "Held-out, before: 100%" in shown
    assert "v_num" not in shown
    assert "Epoch" not in shown
    assert "Sanity" not in shown
