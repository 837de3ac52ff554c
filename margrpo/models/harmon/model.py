"""Harmon as a `HybridModel`: read from, and written to, a directory in the official layout."""

import math
import shutil
from itertools import pairwise
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from margrpo.diffusion.learned_variance import LearnedVarianceTransition, respaced_timesteps
from margrpo.diffusion.transition import Transition
from margrpo.models.base import Condition, HybridModel, Prefix
from margrpo.models.checkpoint import (
    local_directory,
    new_directory,
    read_json,
    read_weight_folder,
    read_weights,
    strip_prefixes,
)
from margrpo.models.harmon.config import HarmonConfig
from margrpo.models.harmon.head import HarmonHead
from margrpo.models.harmon.network import PREFIXES, HarmonNetwork, official_weights
from margrpo.models.harmon.policy import MARPolicy
from margrpo.models.harmon.text import PromptTokenizer, load_tokenizer

CONFIG = "config.json"
WEIGHTS_STEM = "model"
OUTPUT_LAYER = "llm.lm_head.weight"
"""Maps the language model's states to words; image generation has no use for it."""

COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".py")
"""Files of a checkpoint that are not weights: configuration, tokenizer, and the official code, which is never run."""


class Harmon(HybridModel):
    """Harmon image generator (arXiv 2503.21979): MAR with a language model between encoder and decoder.

    Args:
        config: sizes.
        network: policy, head, language model and autoencoder.
        tokenizer: of the language model.
        source: directory the checkpoint came from; its files beside the weights are copied on saving.
        output_layer: the language model's, where the checkpoint has it; it is only written back.
    """

    policy: MARPolicy
    head: HarmonHead

    def __init__(
        self,
        config: HarmonConfig,
        network: HarmonNetwork,
        tokenizer: PreTrainedTokenizerBase,
        source: Path,
        output_layer: Tensor | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.policy = network.policy
        self.head = network.head
        self.language_model = network.language_model
        self.vae = network.vae
        self.source = source
        self.output_layer = output_layer
        self.num_tokens = self.policy.grid**2
        self.token_channels = config.mar.channels
        longest = config.llm.max_position_embeddings - config.mar.buffer_size - self.num_tokens
        self.prompts = PromptTokenizer(tokenizer, longest)
        for name, tensor in self._read(*self.prompts.unconditional()).items():
            self.register_buffer(f"unconditional_{name}", tensor, persistent=False)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        image_size: int = 512,
        original_weights: tuple[str | Path, str | Path] | None = None,
        mar_weights: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Harmon":
        """Load a checkpoint in the official layout.

        Args:
            path_or_repo_id: local directory or Hub repository, with configuration, tokenizer and weights.
            image_size: image side in pixels; position tables are resized to it.
            original_weights: the two files of the original release that replace the weights of the directory: the
                model's `.pth`, and `kl16.ckpt` of the autoencoder.
            mar_weights: file, or directory with a `model.safetensors`, that replaces the weights of policy and head:
                what trainers of the bare MAR save.
            dtype: dtype of all parts.

        Raises:
            CheckpointError: naming the file, key or shape that is missing or does not fit.
            ValueError: image_size is not a multiple of the pixels per token.
        """
        source = local_directory(path_or_repo_id)
        config = HarmonConfig.from_dict(read_json(source / CONFIG), str(source / CONFIG))
        if image_size < 1 or image_size % config.mar.vae_stride:
            raise ValueError(f"image_size is {image_size}; it must be a multiple of {config.mar.vae_stride}")
        tokenizer = load_tokenizer(source)
        if original_weights is None:
            origin, weights = str(source), read_weight_folder(source, WEIGHTS_STEM)
        else:
            file, vae_file = map(Path, original_weights)
            vae = {PREFIXES["vae"] + key: value for key, value in read_weights(vae_file, entry="model").items()}
            origin, weights = f"{file} and {vae_file}", read_weights(file) | vae
        if mar_weights is not None:
            file, prefix = Path(mar_weights), PREFIXES["policy"]
            mar = read_weight_folder(file, WEIGHTS_STEM) if file.is_dir() else read_weights(file)
            weights = {key: value for key, value in weights.items() if not key.startswith(prefix)}
            weights |= {prefix + key: value for key, value in strip_prefixes(mar, ("module.", prefix)).items()}
            origin = f"{file} in {origin}"
        output_layer = weights.pop(OUTPUT_LAYER, None)
        with torch.device("meta"):
            network = HarmonNetwork(config, image_size // config.mar.vae_stride)
        network.assign({key: value.to(dtype) for key, value in weights.items()}, origin)
        return cls(config, network.eval(), tokenizer, source, output_layer).eval()

    def encode(self, prompts: list[str]) -> Condition:
        """Run the language model on P prompts.

        Returns:
            its `keys` and `values`, each [P, L, layers, heads, head width], and `length` int64 [P, 1]: how many of the
            L are not padding.
        """
        return self._read(*self.prompts.conditional(prompts))

    def count_truncated(self, prompts: list[str]) -> int:
        """Count the prompts that do not fit before the tokens of an image."""
        return self.prompts.count_truncated(prompts)

    def unconditional(self) -> Condition:
        """Return the condition of the template that asks for any image, one row."""
        return {name: self.get_buffer(f"unconditional_{name}") for name in ("keys", "values", "length")}

    def prefix(self, policy: nn.Module, condition: Condition) -> Prefix:
        """Return the condition: what precedes the image is the frozen language model's alone."""
        return condition

    def predict_condition(self, policy: nn.Module, latents: Tensor, known: Tensor, prefix: Prefix) -> Tensor:
        """Run encoder, language model and decoder: z [B, N, E]."""
        assert isinstance(policy, MARPolicy)
        # The language model is causal: it reads the known tokens in the order of the image.
        known = known.sort(dim=1).values
        x = policy.encode(latents, known)
        x = self.language_model(x, policy.buffer_size, prefix["keys"], prefix["values"], prefix["length"])
        return policy.decode(x, known)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, N, C] to uint8 images [B, 3, H, W]; values are truncated as the official code does."""
        grid = self.policy.grid
        with torch.no_grad():
            images = self.vae.decode(latents.to(self.vae.quant_conv.weight.dtype), grid, grid).float()
        return (images * 127.5 + 128.0).clamp(0, 255).to(torch.uint8)

    def mask_schedule(self, steps: int) -> list[int]:
        """Cosine schedule in which every step predicts at least one token, as long as there is one."""
        unknown = [self.num_tokens]
        for step in range(1, steps):
            wanted = math.floor(self.num_tokens * math.cos(math.pi / 2 * step / steps))
            unknown.append(max(1, min(unknown[-1] - 1, wanted)))
        return [before - after for before, after in pairwise([*unknown, 0]) if before > after]

    def transition(self, denoising_steps: int, noise_level: float, stochastic_steps: int | None) -> Transition:
        """Ancestral kernel with the variance the head predicts, spaced as in the checkpoint's `num_sampling_steps`.

        Raises:
            ValueError: the spacing does not give that many steps, or stochastic_steps is not None: all are stochastic
                but the last.
        """
        if stochastic_steps is not None:
            raise ValueError(f"stochastic_steps={stochastic_steps} needs a flow checkpoint; for Harmon use null")
        return LearnedVarianceTransition(respaced_timesteps(f"{self.config.mar.spacing}{denoising_steps}"))

    def policy_parts(self) -> dict[str, nn.Module]:
        """Parts whose gradient norms are logged apart."""
        return {
            "token_projection": self.policy.z_proj,
            "encoder": self.policy.encoder_blocks,
            "decoder": self.policy.decoder_blocks,
        }

    def save_pretrained(self, path: Path) -> None:
        """Write the official layout: the current policy and head, and everything frozen as it was read.

        The directory appears at once, complete: it is written beside and renamed.

        Raises:
            FileExistsError: `path` exists.
        """
        weights = official_weights({name: self.get_submodule(name) for name in PREFIXES})
        if self.output_layer is not None:
            weights[OUTPUT_LAYER] = self.output_layer
        tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        with new_directory(path) as target:
            for file in sorted(self.source.iterdir()):
                if file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, target / file.name)
            save_torch_state_dict(tensors, target)

    @torch.no_grad()
    def _read(self, token_ids: Tensor, length: Tensor) -> Condition:
        keys, values = self.language_model.prefill(token_ids.to(self.device))
        return {"keys": keys, "values": values, "length": length.to(self.device)}
