"""Harmon behind the command line: the shipped configuration, and a run with export on the tiny checkpoint."""

from pathlib import Path

import pytest
import torch
import yaml

from margrpo.cli import main
from margrpo.models.harmon import Harmon

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
YOURS = ["--data.train_prompts", "mine.txt", "--data.rewards+", "margrpo.rewards.brightness.Brightness"]


def test_the_shipped_experiment_is_a_valid_configuration_of_the_published_values(capsys):
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", str(EXPERIMENTS / "harmon-1_5b.yaml"), *YOURS, "--print_config"])
    assert error.value.code in (0, None)
    values = yaml.safe_load(capsys.readouterr().out)
    assert values["model"]["model"]["class_path"] == "margrpo.models.harmon.from_pretrained"
    rollout = values["data"]["rollout"]
    assert (rollout["mask_steps"], rollout["denoising_steps"], rollout["guidance_scale"]) == (64, 25, 3.0)
    assert (rollout["trained_mask_steps"], rollout["num_trajectories"]) == (12, 5)
    assert values["model"]["optimizer"]["learning_rate"] == 1e-6


def test_a_configuration_of_another_family_runs_with_the_model_replaced(checkpoint, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red car\na dog\nété\n", encoding="utf-8")
    values = yaml.safe_load((EXPERIMENTS / "nova-tiny.yaml").read_text())
    values["trainer"] |= {"max_steps": 2, "val_check_interval": 2}
    values["trainer"]["logger"]["init_args"] = {"save_dir": str(tmp_path / "runs"), "name": "test"}
    values["model"]["model"] = {
        "class_path": "margrpo.models.harmon.from_pretrained",
        "init_args": {"path_or_repo_id": str(checkpoint), "image_size": 128},
    }
    values["data"] |= {
        "train_prompts": str(prompts),
        "heldout_prompts": str(prompts),
        "rewards": [{"class_path": "margrpo.rewards.brightness.Brightness"}],
        "prompts_per_step": 1,
    }
    small = {"group_size": 2, "mask_steps": 4, "denoising_steps": 4, "trained_mask_steps": 2}
    values["data"]["rollout"] |= small | {"trained_denoising_steps": 2, "stochastic_steps": None}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values))
    main(["fit", "--config", str(config)])
    (run,) = (tmp_path / "runs" / "test").iterdir()
    assert (run / "summary.json").is_file()
    main(["export", str(run), str(tmp_path / "exported")])
    capsys.readouterr()
    exported = Harmon.from_pretrained(tmp_path / "exported", 128)
    trained = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in exported.policy.state_dict().items():
        assert torch.equal(tensor, trained[f"model.policy.{name}"]), name
    before = Harmon.from_pretrained(checkpoint, 128)
    assert not torch.equal(exported.policy.mask_token, before.policy.mask_token)
    assert torch.equal(exported.policy.class_emb.weight, before.policy.class_emb.weight)
