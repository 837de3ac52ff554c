"""Command line: `margrpo fit | validate | predict | export`."""

import sys
from pathlib import Path

import jsonargparse
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor

from margrpo.models.base import HybridModel
from margrpo.models.checkpoint import CheckpointError
from margrpo.module import MARGRPO
from margrpo.rollout.datamodule import RolloutDataModule

EXPORT_HELP = "margrpo export --help: write the policy of a training checkpoint in the official layout of its family"
ACCEPTED_CHECKPOINT = "a .ckpt file that `margrpo fit` wrote"


class RunCLI(LightningCLI):
    """LightningCLI for `MARGRPO` and `RolloutDataModule`; unknown keys are refused."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Say in every help page that there is one more command."""
        parser.epilog = EXPORT_HELP


def export(run: str, output: str, checkpoint: str | None = None) -> None:
    """Write the policy of a training checkpoint in the official layout of its family.

    Args:
        run: run directory with the `config.yaml` and `checkpoints/` of a training run.
        output: directory to write; must not exist.
        checkpoint: training checkpoint; the run's `checkpoints/last.ckpt` by default.
    """
    config_file = Path(run) / "config.yaml"
    checkpoint_file = Path(checkpoint or Path(run) / "checkpoints" / "last.ckpt")
    for file in (config_file, checkpoint_file):
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; expected the files of a training run")
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--model", type=HybridModel)
    run_config = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    model: HybridModel = parser.instantiate(parser.parse_object({"model": run_config["model"]["model"]})).model
    load_trained_weights(model, checkpoint_file)
    model.save_pretrained(Path(output))


def load_trained_weights(model: HybridModel, file: Path) -> None:
    """Put the weights of a training checkpoint into a freshly loaded model.

    Raises:
        CheckpointError: the file is not a training checkpoint of this model.
    """
    state = read_training_checkpoint(file)
    weights = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    expected = model.state_dict()
    wrong = [key for key, value in weights.items() if key not in expected or expected[key].shape != value.shape]
    missing = [key for key in expected if key.startswith("policy.") and key not in weights]
    if wrong or missing:
        problem = f"{wrong[0]} does not fit the model of the run" if wrong else f"lacks {missing[0]}"
        raise CheckpointError(f"{file}: {problem}; expected {ACCEPTED_CHECKPOINT} with this model")
    model.load_state_dict(weights, strict=False)


def read_training_checkpoint(file: Path) -> dict[str, Tensor]:
    """Read the weights of a training checkpoint on the CPU.

    Raises:
        CheckpointError: the file is corrupt, or something else.
    """
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler runs into: on a text file, a KeyError
        raise CheckpointError(
            f"{file}: cannot be read ({type(error).__name__}); expected {ACCEPTED_CHECKPOINT}"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"{file}: has no state_dict; expected {ACCEPTED_CHECKPOINT}")
    return checkpoint["state_dict"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["export"]:
        jsonargparse.auto_cli(export, args=given[1:], prog="margrpo export")
        return
    RunCLI(
        MARGRPO,
        RolloutDataModule,
        args=arguments,
        seed_everything_default=20,
        auto_configure_optimizers=False,
        parser_kwargs={"prog": "margrpo"},
    )
