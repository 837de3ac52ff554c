"""The command line as a user meets it."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from margrpo.cli import main
from margrpo.models.checkpoint import CheckpointError
from margrpo.models.nova import NOVA

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
SUMMARY_KEYS = {
    "heldout_prompts",
    "heldout_reward_before",
    "heldout_reward_after",
    "paired_standard_error",
    "steps",
    "seconds_total",
    "seconds_rollout",
    "seconds_reward",
    "seconds_update",
    "kl_final",
    "gradient_norm_median",
    "images_per_second",
}


@pytest.fixture(scope="module")
def config(data_dir, tmp_path_factory):
    """Write the configuration of the tiny experiment for the test checkpoint, cut down to two steps."""
    folder = tmp_path_factory.mktemp("cli")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red car\na dog\nété\n", encoding="utf-8")
    values = yaml.safe_load((EXPERIMENTS / "nova-tiny.yaml").read_text())
    values["trainer"] |= {"max_steps": 2, "val_check_interval": 2}
    values["trainer"]["logger"]["init_args"] = {"save_dir": str(folder / "runs"), "name": "test"}
    values["model"]["model"]["init_args"]["path_or_repo_id"] = str(data_dir / "nova" / "checkpoint")
    values["data"] |= {
        "train_prompts": str(prompts),
        "heldout_prompts": str(prompts),
        "rewards": [{"class_path": "margrpo.rewards.brightness.Brightness"}],
        "prompts_per_step": 1,
    }
    values["data"]["rollout"] |= {
        "group_size": 2,
        "mask_steps": 4,
        "denoising_steps": 3,
        "trained_mask_steps": 2,
        "trained_denoising_steps": 2,
        "stochastic_steps": None,
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def run(config):
    """Train two steps; return the run directory."""
    main(["fit", "--config", str(config)])
    return config.parent / "runs" / "test" / "version_0"


def test_a_run_directory_holds_config_events_checkpoints_grids_and_summary(run):
    assert (run / "config.yaml").is_file()
    assert list(run.glob("events.out.tfevents*"))
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert list((run / "checkpoints").glob("best-*.ckpt"))
    assert {file.name for file in (run / "samples").iterdir()} == {"step_000000.png", "step_000002.png"}
    summary = json.loads((run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["steps"], summary["heldout_prompts"]) == (2, 3)


def test_export_writes_the_official_layout_with_the_trained_policy(run, data_dir, tmp_path):
    main(["export", str(run), str(tmp_path / "exported")])
    source = data_dir / "nova" / "checkpoint"
    for file in source.rglob("*"):
        assert (tmp_path / "exported" / file.relative_to(source)).exists(), file
    weights = "transformer/diffusion_pytorch_model.safetensors"
    official, exported = load_file(source / weights), load_file(tmp_path / "exported" / weights)
    assert {k: v.shape for k, v in official.items()} == {k: v.shape for k, v in exported.items()}
    trained = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in NOVA.from_pretrained(tmp_path / "exported").policy.state_dict().items():
        assert torch.equal(tensor, trained[f"model.policy.{name}"]), name
    assert not torch.equal(official["image_encoder.norm.bias"], exported["image_encoder.norm.bias"])


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "weights", "other keys", "other shape"])
def test_export_refuses_a_file_that_is_no_checkpoint_of_the_run(run, tmp_path, kind):
    file = tmp_path / "mine.ckpt"
    whole = run / "checkpoints" / "last.ckpt"
    state = torch.load(whole, weights_only=True)["state_dict"]
    key = "model.policy.image_encoder.norm.bias"
    if kind in ("empty", "text", "cut"):
        file.write_bytes({"empty": b"", "text": b"hello world", "cut": whole.read_bytes()[:-1000]}[kind])
    else:
        broken = {"other keys": {"layer.weight": state[key]}, "other shape": {**state, key: state[key][1:]}}
        torch.save(state if kind == "weights" else {"state_dict": broken[kind]}, file)
    with pytest.raises(CheckpointError, match=r"mine\.ckpt: .*; expected a \.ckpt file that `margrpo fit` wrote"):
        main(["export", str(run), str(tmp_path / "exported"), "--checkpoint", str(file)])
    assert not (tmp_path / "exported").exists()


def test_export_names_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.yaml: missing"):
        main(["export", str(tmp_path), str(tmp_path / "exported")])


def test_validate_reproduces_the_held_out_reward_of_the_run(run, config, capsys):
    main(["validate", "--config", str(config), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")])
    after = json.loads((run / "summary.json").read_text())["heldout_reward_after"]
    printed = re.search(r"reward/heldout\s+│\s+([0-9.]+)", capsys.readouterr().out)
    assert printed is not None
    assert float(printed[1]) == pytest.approx(after, abs=1e-6)


def test_predict_writes_an_image_per_prompt(config, tmp_path):
    prompts = tmp_path / "mine.txt"
    prompts.write_text("one\ntwo\n")
    writer = {
        "class_path": "margrpo.callbacks.writer.ImageWriter",
        "init_args": {"output_dir": str(tmp_path / "images")},
    }
    main(
        [
            "predict",
            "--config",
            str(config),
            "--data.predict_prompts",
            str(prompts),
            "--trainer.callbacks+",
            json.dumps(writer),
        ]
    )
    assert sorted(file.name for file in (tmp_path / "images").iterdir()) == [
        "000000.png",
        "000001.png",
        "prompts.jsonl",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.rollout.group_sise", "4"], "group_sise"),
        (["--model.optimizer.learning_rate", "fast"], "learning_rate"),
        (["--data.rollout.critical_fraction", "1.5"], "critical_fraction is 1.5; it must lie in"),
        (["--data.rollout.trajectory_source", "both"], "trajectory_source"),
    ],
)
def test_a_bad_option_stops_before_any_compute_and_is_named(config, capsys, arguments, message):
    with pytest.raises((SystemExit, ValueError)) as error:
        main(["fit", "--config", str(config), *arguments])
    assert message in capsys.readouterr().err + str(error.value)


YOURS = ["--data.train_prompts", "mine.txt", "--data.rewards+", "margrpo.rewards.brightness.Brightness"]


@pytest.mark.parametrize(("name", "arguments"), [("nova-tiny.yaml", []), ("nova-sd512.yaml", YOURS)])
def test_the_shipped_experiments_are_valid_configurations(name, arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(["fit", "--config", str(EXPERIMENTS / name), *arguments, "--print_config"])
    assert error.value.code in (0, None)
    assert "critical_fraction: 0.3" in capsys.readouterr().out


def test_the_published_checkpoint_is_never_trained_on_a_reward_nobody_chose(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(EXPERIMENTS / "nova-sd512.yaml"), "--data.train_prompts", "mine.txt"])
    assert "data.rewards" in capsys.readouterr().err


def test_help_documents_the_options_with_their_source(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for phrase in ("--data.rollout.critical_fraction", "multi-trajectory expectation", "arXiv", "margrpo export"):
        assert phrase in text


def test_a_prompt_geometry_that_does_not_divide_is_named_before_training(config):
    with pytest.raises(ValueError, match="prompts_per_step is 0"):
        main(["fit", "--config", str(config), "--data.prompts_per_step", "0"])


def test_a_missing_prompt_file_is_named_before_training(config, tmp_path):
    missing = tmp_path / "none.txt"
    with pytest.raises(ValueError, match=r"none\.txt"):
        main(["fit", "--config", str(config), "--data.train_prompts", str(missing)])
