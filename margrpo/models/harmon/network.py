"""All parts of Harmon, under the key names of the published checkpoints."""

from typing import Any

from torch import Tensor, nn

from margrpo.models.checkpoint import check_weights
from margrpo.models.harmon.config import HarmonConfig
from margrpo.models.harmon.head import HarmonHead
from margrpo.models.harmon.llm import LanguageModel
from margrpo.models.harmon.policy import MARPolicy
from margrpo.models.harmon.vae import VAE

PREFIXES = {"head": "mar.diffloss.net.", "policy": "mar.", "vae": "vae.", "language_model": ""}
"""What stands before the keys of each part; the first that fits a key is its part's."""


def official_weights(parts: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Weights of the named parts under the key names of the published checkpoints."""
    return {PREFIXES[name] + key: value for name, part in parts.items() for key, value in part.state_dict().items()}


class HarmonNetwork(nn.Module):
    """Policy, head, language model and autoencoder.

    Args:
        config: sizes.
        grid: rows and columns of tokens of an image.
    """

    def __init__(self, config: HarmonConfig, grid: int) -> None:
        super().__init__()
        mar = config.mar
        self.policy = MARPolicy(mar, grid)
        self.head = HarmonHead(mar.channels, mar.decoder.width, mar.head_width, mar.head_depth)
        self.language_model = LanguageModel(config.llm, mar.encoder.width)
        self.vae = VAE(config.vae, mar.channels)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the published keys."""
        return official_weights(dict(self.named_children()))

    def assign(self, weights: dict[str, Tensor], source: str) -> None:
        """Take over weights under the published keys; raises CheckpointError when keys or shapes differ."""
        check_weights(self, weights, source)
        by_part: dict[str, dict[str, Tensor]] = {name: {} for name in PREFIXES}
        for key, value in weights.items():
            name = next(name for name, prefix in PREFIXES.items() if key.startswith(prefix))
            by_part[name][key.removeprefix(PREFIXES[name])] = value
        for name, part in self.named_children():
            part.load_state_dict(by_part[name], assign=True)
        self.language_model.build_tables()
