"""NOVA as a `HybridModel`: components read from, and written to, a directory in the official layout."""

import math
import pickle
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PhiModel, PreTrainedTokenizerBase

from margrpo.diffusion.dispatch import transition_from_scheduler
from margrpo.diffusion.transition import Transition
from margrpo.models.base import Condition, HybridModel, Prefix
from margrpo.models.checkpoint import (
    CheckpointError,
    check_weights,
    local_directory,
    read_json,
    read_weight_folder,
    read_weights,
    strip_prefixes,
)
from margrpo.models.nova.config import NOVAConfig
from margrpo.models.nova.head import NOVAHead
from margrpo.models.nova.layers import unpatchify
from margrpo.models.nova.policy import NOVAPolicy
from margrpo.models.nova.text import TextEncoder

COMPONENTS = {
    "tokenizer": ("CodeGenTokenizerFast", "CodeGenTokenizer"),
    "text_encoder": ("PhiEncoderModel",),
    "transformer": ("NOVATransformer3DModel",),
    "vae": ("AutoencoderKL",),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", "DDPMScheduler"),
}
"""Class names accepted in `model_index.json`; the modules named beside them are code and are never imported."""

INDEX = "model_index.json"
SCHEDULERS = {"FlowMatchEulerDiscreteScheduler": FlowMatchEulerDiscreteScheduler, "DDPMScheduler": DDPMScheduler}
HEAD_PREFIX = "image_decoder."
WEIGHTS_STEM = "diffusion_pytorch_model"
TRAINER_PREFIXES = ("module.", "transformer.", "model.")


def official_weights(policy: nn.Module, head: nn.Module) -> dict[str, Tensor]:
    """Weights of policy and head under the key names of the official transformer."""
    return {**policy.state_dict(), **{HEAD_PREFIX + key: value for key, value in head.state_dict().items()}}


class NOVATransformer(nn.Module):
    """Policy and head under the key names of the official transformer."""

    def __init__(self, config: NOVAConfig) -> None:
        super().__init__()
        self.policy = NOVAPolicy(config)
        self.head = NOVAHead(config)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the official keys."""
        return official_weights(self.policy, self.head)

    def assign(self, weights: dict[str, Tensor], source: str) -> None:
        """Take over weights under official keys; raises CheckpointError when keys or shapes differ."""
        check_weights(self, weights, source)
        head = {k.removeprefix(HEAD_PREFIX): v for k, v in weights.items() if k.startswith(HEAD_PREFIX)}
        policy = {k: v for k, v in weights.items() if not k.startswith(HEAD_PREFIX)}
        self.policy.load_state_dict(policy, assign=True)
        self.head.load_state_dict(head, assign=True)
        self.policy.build_tables()


class NOVA(HybridModel):
    """NOVA image generator (arXiv 2412.14169).

    Args:
        config: sizes of the transformer.
        transformer: policy and head.
        text_encoder: frozen text side.
        vae: frozen autoencoder.
        scheduler: diffusers scheduler of the head.
        source: directory the components came from; its frozen parts are copied on saving.
    """

    policy: NOVAPolicy
    head: NOVAHead

    def __init__(
        self,
        config: NOVAConfig,
        transformer: NOVATransformer,
        text_encoder: TextEncoder,
        vae: AutoencoderKL,
        scheduler: SchedulerMixin,
        source: Path,
    ) -> None:
        super().__init__()
        self.config = config
        self.policy = transformer.policy
        self.head = transformer.head
        self.text_encoder = text_encoder
        self.vae = vae
        self.scheduler = scheduler
        self.source = source
        self.num_tokens = config.num_tokens
        self.token_channels = config.token_channels

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        transformer_weights: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "NOVA":
        """Load a checkpoint in the official layout.

        Args:
            path_or_repo_id: local directory or Hub repository.
            transformer_weights: file, or directory with a `model.safetensors`, that replaces the transformer's
                weights: what trainers of the bare transformer save.
            dtype: dtype of policy, head, text encoder and VAE.

        Raises:
            CheckpointError: naming the file, key or shape that is missing or does not fit.
        """
        source = local_directory(path_or_repo_id)
        names = component_classes(source)
        config = NOVAConfig.from_dict(read_json(source / "transformer" / "config.json"), str(source / "transformer"))
        with torch.device("meta"):
            transformer = NOVATransformer(config)
        if transformer_weights is None:
            weights = read_weight_folder(source / "transformer", WEIGHTS_STEM)
            transformer.assign(_cast(weights, dtype), str(source / "transformer"))
        else:
            file = Path(transformer_weights)
            weights = read_weight_folder(file, "model") if file.is_dir() else read_weights(file)
            transformer.assign(_cast(strip_prefixes(weights, TRAINER_PREFIXES), dtype), str(file))
        vae = AutoencoderKL.from_config(read_json(source / "vae" / "config.json"))
        vae_weights = read_weight_folder(source / "vae", WEIGHTS_STEM)
        check_weights(vae, vae_weights, str(source / "vae"))
        vae.load_state_dict(vae_weights)
        model = cls(
            config,
            transformer,
            TextEncoder(
                load_tokenizer(source / "tokenizer"),
                load_phi(source / "text_encoder", config.text_token_dim),
                config.text_token_len,
            ),
            vae,
            SCHEDULERS[names["scheduler"]].from_config(read_json(source / "scheduler" / "scheduler_config.json")),
            source,
        )
        return model.to(dtype).eval()

    def encode(self, prompts: list[str]) -> Condition:
        """Encode P prompts: `prompt_embeds` [P, length, token_dim]."""
        with torch.no_grad():
            return {"prompt_embeds": self.text_encoder(prompts, self.policy.text_embed.weight)}

    def count_truncated(self, prompts: list[str]) -> int:
        """Count the prompts that have more tokens than the text side has rows."""
        return self.text_encoder.count_truncated(prompts)

    def unconditional(self) -> Condition:
        """Return the null prompt, one row."""
        return {"prompt_embeds": self.policy.text_embed.weight[None, : self.config.text_token_len]}

    def prefix(self, policy: nn.Module, condition: Condition) -> Prefix:
        """Run text embedding and video encoder: `context` [P, V, E]."""
        assert isinstance(policy, NOVAPolicy)
        return {"context": policy.prefix(condition["prompt_embeds"])}

    def predict_condition(self, policy: nn.Module, latents: Tensor, known: Tensor, prefix: Prefix) -> Tensor:
        """Run the image encoder: z [B, N, E]."""
        return policy(latents, known, prefix["context"])

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, N, C] to uint8 images [B, 3, H, W]; values are truncated as the official code does."""
        rows, columns = self.config.image_base_size
        grid = unpatchify(latents.to(self.vae.dtype), self.config.patch, rows, columns)
        grid = grid / self.vae.config.scaling_factor + (self.vae.config.shift_factor or 0.0)
        with torch.no_grad():
            images = self.vae.decode(grid).sample.float()
        return (images * 127.5 + 127.5).clamp(0, 255).to(torch.uint8)

    def mask_schedule(self, steps: int) -> list[int]:
        """Cosine schedule; steps that would predict no token are dropped."""
        masked = [round(math.cos(math.pi / 2 * k / steps) * self.num_tokens) for k in range(steps + 1)]
        return [before - after for before, after in pairwise(masked) if before > after]

    def transition(self, denoising_steps: int, noise_level: float, stochastic_steps: int | None) -> Transition:
        """Kernel of the checkpoint's scheduler: SDE on flow matching, or ancestral DDPM."""
        return transition_from_scheduler(self.scheduler, denoising_steps, noise_level, stochastic_steps)

    def policy_parts(self) -> dict[str, nn.Module]:
        """Parts whose gradient norms are logged apart."""
        return {
            "video_encoder": self.policy.video_encoder,
            "image_encoder": self.policy.image_encoder,
            "text_projection": self.policy.text_embed,
        }

    def save_pretrained(self, path: Path) -> None:
        """Write the official layout: the current policy and head, everything frozen copied byte for byte.

        The directory appears at once, complete: it is written beside and renamed.

        Raises:
            FileExistsError: `path` exists.
        """
        if path.exists():
            raise FileExistsError(f"{path}: already exists; name a new directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = official_weights(self.policy, self.head)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            target = Path(scratch) / "checkpoint"
            _copy_frozen(self.source, target)
            tensors = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
            save_file(tensors, target / "transformer" / f"{WEIGHTS_STEM}.safetensors", metadata={"format": "pt"})
            target.rename(path)


def component_classes(source: Path) -> dict[str, str]:
    """Read the class name of every component from `model_index.json`.

    Raises:
        CheckpointError: a component is missing, its folder is, or its class is not one NOVA has.
    """
    index = read_json(source / INDEX)
    names = {}
    for component, accepted in COMPONENTS.items():
        entry = index.get(component)
        if not isinstance(entry, list) or len(entry) != 2:
            raise CheckpointError(f"{source / INDEX}: no [module, class] entry for {component}")
        if entry[1] not in accepted:
            raise CheckpointError(f"{source / INDEX}: {component} is a {entry[1]}; accepted: {', '.join(accepted)}")
        if not (source / component).is_dir():
            raise CheckpointError(f"{source / component}: missing")
        names[component] = entry[1]
    return names


class PhiEncoder(PhiModel):
    """Phi without its language-model head, which checkpoints may carry along."""

    _keys_to_ignore_on_load_unexpected = (r"lm_head\..*",)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer; raises CheckpointError when files are missing or it needs code of the checkpoint."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: tokenizer cannot be loaded: {error}") from error


def load_phi(folder: Path, width: int) -> PhiModel:
    """Load the text encoder; raises CheckpointError when its width is not `width` or its weights do not fit."""
    found = read_json(folder / "config.json").get("hidden_size")
    if found != width:
        raise CheckpointError(f"{folder}: the text encoder is {found} wide, the transformer expects {width}")
    try:
        encoder, report = PhiEncoder.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    except (OSError, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder}: text encoder cannot be loaded: {error}") from error
    # A mismatch is a key with its two shapes; by default it would only be logged.
    mismatched = [key for key, *_ in report["mismatched_keys"]]
    for problem, keys in (("missing weights", report["missing_keys"]), ("other shapes for", mismatched)):
        if keys:
            raise CheckpointError(f"{folder}: {problem} {', '.join(sorted(keys)[:3])}")
    return encoder


def _cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) for key, value in weights.items()}


def _copy_frozen(source: Path, target: Path) -> None:
    """Copy the index and the components but the transformer's weights.

    Permissions are not copied, because a checkpoint may be on a read-only share; nor is anything else that lies beside
    the components.
    """
    target.mkdir()
    shutil.copyfile(source / INDEX, target / INDEX)
    for file in sorted(path for component in COMPONENTS for path in (source / component).rglob("*")):
        relative = file.relative_to(source)
        is_replaced = relative.parent == Path("transformer") and file.name.startswith(WEIGHTS_STEM)
        if file.is_file() and not is_replaced:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target / relative)
