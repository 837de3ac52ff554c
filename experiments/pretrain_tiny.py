"""Pretrains the tiny NOVA that ships with the package: tokenizer, text encoder, VAE, then masked flow matching.

    python experiments/pretrain_tiny.py --output margrpo/assets/nova-tiny

Needs torch 2.9 for its Muon. Scenes are drawn by `margrpo.shapes`; held-out prompts are never seen. The stages leave
their result under `--work`, so that an interrupted run goes on; `nova-tiny-pretraining.csv` beside the checkpoint keeps
the loss and the verifier's score.
"""

import argparse
import csv
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from transformers import CodeGenTokenizerFast, PhiConfig, PhiForCausalLM

from margrpo.models.nova.config import NOVAConfig
from margrpo.models.nova.layers import patchify
from margrpo.models.nova.model import NOVA, NOVATransformer, official_weights
from margrpo.rewards.shapes import ShapesReward
from margrpo.rollout.config import SamplingConfig
from margrpo.rollout.denoising import TokenDenoiser
from margrpo.rollout.noise import SampleNoise, stable_seed
from margrpo.rollout.sampler import generate
from margrpo.shapes.grammar import (
    BACKGROUND,
    COLOURS,
    GAP,
    MARGIN,
    RADIUS,
    SHAPES,
    SIDE,
    Placed,
    Scene,
    prompts,
    sample_scene,
)
from margrpo.shapes.renderer import render_batch

SHRINK = 0.55
"""Smallest factor of a radius in the training scenes."""

EXTRA_SHARE = 0.5
"""Share of training scenes in which an object is added where there is room."""

END_OF_TEXT = "<|endoftext|>"
CONFIG = NOVAConfig(
    image_dim=4,
    image_size=128,
    image_stride=8,
    text_token_dim=64,
    text_token_len=20,
    video_base_size=(1, 4, 4),
    image_base_size=(8, 8),
    arch=("vit_d2w96", "vit_d6w96", "mlp_d3w96"),
)


@dataclass(frozen=True)
class Settings:
    """Sizes of the training; the defaults made the shipped checkpoint."""

    output: Path
    work: Path
    seed: int = 7
    vae_steps: int = 1500
    vae_batch: int = 16
    scenes: int = 40_000
    steps: int = 3600
    batch: int = 64
    head_repeats: int = 3
    learning_rate: float = 1.5e-3
    matrix_learning_rate: float = 3e-3
    text_dropout: float = 0.1
    average: float = 0.999
    evaluate_every: int = 1000


def draw_scenes(count: int, seed: int, *, loose: bool) -> tuple[list[str], np.ndarray]:
    """Draw training prompts with a scene of each, exact or loose: prompts, uint8 [count, 3, 128, 128]."""
    drawn = prompts(count, seed=seed, held_out=False)
    rng = np.random.default_rng(seed)
    scenes = [sample_scene(record, rng) for record in drawn]
    if loose:
        scenes = [loosen(scene, rng) for scene in scenes]
    return [record["prompt"] for record in drawn], np.asarray(render_batch(scenes))


def loosen(scene: Scene, rng: np.random.Generator) -> Scene:
    """Make a scene fit its prompt only loosely: objects shrink, and half of the scenes gain one nobody asked for.

    Captions found in the world leave things out too. What the verifier asks for beyond them is left to the reward.
    """
    smallest, largest = RADIUS
    loose = [replace(thing, radius=thing.radius * rng.uniform(SHRINK, 1.0)) for thing in scene]
    if rng.random() < EXTRA_SHARE:
        radius = rng.uniform(SHRINK * smallest, largest)
        x, y = rng.uniform(radius + MARGIN, SIDE - radius - MARGIN, size=2)
        shape, colour = SHAPES[rng.integers(len(SHAPES))], list(COLOURS)[rng.integers(len(COLOURS))]
        extra = Placed(shape, colour, float(x), float(y), float(radius))
        if all(math.hypot(x - other.x, y - other.y) >= extra.reach + other.reach + GAP for other in loose):
            loose.append(extra)
    return loose


def to_unit(images: np.ndarray | Tensor) -> Tensor:
    """Scale uint8 images to fp32 in [-1, 1]."""
    return torch.as_tensor(images).float() / 127.5 - 1.0


def build_text_side(settings: Settings) -> None:
    """Train the tokenizer on the grammar's prompts and save it with an untrained text encoder."""
    texts = [p["prompt"] for p in prompts(20_000, seed=settings.seed, held_out=False)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=[END_OF_TEXT])
    folder = settings.work / "tokenizer"
    folder.mkdir(parents=True)
    bpe.save_model(str(folder))
    tokenizer = CodeGenTokenizerFast.from_pretrained(folder, **dict.fromkeys(("pad_token", "bos_token"), END_OF_TEXT))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(settings.seed)
    encoder = PhiForCausalLM(
        PhiConfig(
            vocab_size=len(tokenizer),
            hidden_size=CONFIG.text_token_dim,
            intermediate_size=2 * CONFIG.text_token_dim,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.pad_token_id,
        )
    )
    encoder.config.architectures = ["PhiEncoderModel"]
    encoder.save_pretrained(settings.work / "text_encoder")


def train_vae(settings: Settings) -> None:
    """Train the autoencoder: reconstruction through noisy latents, so that the decoder forgives the sampler's noise."""
    torch.manual_seed(settings.seed)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 32),
        layers_per_block=1,
        latent_channels=CONFIG.image_dim,
        norm_num_groups=1,
        sample_size=CONFIG.image_size,
    )
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=settings.vae_steps, pct_start=0.1)
    _, pool = draw_scenes(8000, settings.seed + 1, loose=False)
    background = to_unit(torch.tensor(BACKGROUND))[:, None, None]
    rng = np.random.default_rng(settings.seed)
    for step in range(settings.vae_steps):
        images = to_unit(pool[rng.integers(len(pool), size=settings.vae_batch)])
        with torch.autocast("cpu", torch.bfloat16):
            latents = vae.encode(images).latent_dist.mode().float()
            noisy = latents + 0.08 * latents.std().detach() * torch.randn_like(latents)
            decoded = vae.decode(noisy).sample.float()
        objects = (images - background).abs().amax(dim=1, keepdim=True) > 0.1
        error = (decoded - images).square() + 0.2 * (decoded - images).abs()
        loss = (error * (1 + 4 * objects)).mean() + 1e-4 * latents.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"vae {step} loss {loss.item():.4f} mse {F.mse_loss(decoded, images).item():.5f}", flush=True)
    with torch.no_grad():
        latents = torch.cat([vae.encode(to_unit(chunk)).latent_dist.mode() for chunk in np.split(pool[:512], 16)])
    vae.register_to_config(scaling_factor=round(1.0 / latents.std().item(), 5))
    vae.save_pretrained(settings.work / "vae")


def encode_scenes(settings: Settings) -> None:
    """Encode the training scenes once."""
    vae = AutoencoderKL.from_pretrained(settings.work / "vae")
    texts, tokens = [], []
    for seed in range(settings.scenes // 1000):
        chunk_texts, images = draw_scenes(1000, stable_seed(settings.seed, seed) % 2**32, loose=True)
        with torch.no_grad():
            latents = torch.cat([vae.encode(to_unit(part)).latent_dist.mode() for part in np.split(images, 20)])
        texts += chunk_texts
        tokens.append(patchify(latents * vae.config.scaling_factor, CONFIG.patch).half())
        print(f"encoded {len(texts)} scenes", flush=True)
    torch.save({"texts": texts, "tokens": torch.cat(tokens)}, settings.work / "scenes.pt")


def assemble(settings: Settings) -> None:
    """Write a checkpoint in the official layout around a freshly initialised transformer."""
    torch.manual_seed(settings.seed)
    transformer = NOVATransformer(CONFIG)
    nn.init.normal_(transformer.policy.mask_embed.bos_token, std=0.02)
    nn.init.normal_(transformer.policy.mask_embed.mask_token, std=0.02)
    nn.init.normal_(transformer.policy.text_embed.weight, std=0.02)
    for encoder in (transformer.policy.video_encoder, transformer.policy.image_encoder):
        for block in encoder.blocks:
            # Branches that start small learn faster behind this normalisation (Swin V2, arXiv 2111.09883).
            nn.init.constant_(block.norm1.weight, 0.1)
            nn.init.constant_(block.norm2.weight, 0.1)
    zero = [transformer.head.head, transformer.head.norm.proj, *(block.norm1.proj for block in transformer.head.blocks)]
    for layer in zero:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    index = {
        "_class_name": "NOVAPipeline",
        "tokenizer": ["transformers", "CodeGenTokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "vae": ["__vae__", "AutoencoderKL"],
        "text_encoder": ["__text_encoder__", "PhiEncoderModel"],
        "transformer": ["__transformer__", "NOVATransformer3DModel"],
    }
    (settings.work / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(settings.work / "scheduler")
    folder = settings.work / "transformer"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict(), indent=2) + "\n")
    save_transformer(transformer.state_dict(), folder)


def save_transformer(weights: dict[str, Tensor], folder: Path) -> None:
    """Write the transformer's weights under their official name."""
    tensors = {key: value.detach().contiguous().clone() for key, value in weights.items()}
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


class Trainee(nn.Module):
    """Everything that is trained: transformer, null prompt and text encoder."""

    def __init__(self, model: NOVA) -> None:
        super().__init__()
        self.model = model
        model.requires_grad_(False)
        model.policy.requires_grad_(True)
        model.head.requires_grad_(True)
        model.text_encoder.requires_grad_(True)
        model.policy.text_embed.weight.requires_grad_(True)
        self.null_prompt = model.policy.text_embed.weight
        trained = [p for p in model.parameters() if p.requires_grad]
        self.trained = [*trained, self.null_prompt]

    def loss(self, texts: list[str], tokens: Tensor, known: Tensor, settings: Settings) -> Tensor:
        """Masked flow matching: velocity error at the unknown tokens.

        Args:
            texts: B prompts.
            tokens: clean latents [B, N, C].
            known: int64 [B, K], tokens the policy sees.
            settings: dropout of the prompt and noise levels per token.
        """
        model = self.model
        embeds = model.text_encoder(texts, self.null_prompt)
        dropped = torch.rand(len(texts)) < settings.text_dropout
        embeds = torch.where(dropped[:, None, None], self.null_prompt[: CONFIG.text_token_len], embeds)
        prefix = {"context": model.policy.prefix(embeds)}
        z = model.predict_condition(model.policy, tokens, known, prefix)
        unknown = torch.ones(tokens.shape[:2], dtype=torch.bool).scatter(1, known, False)
        z, clean = z[unknown], tokens[unknown]
        condition = model.head.embed_condition(z).repeat(settings.head_repeats, 1)
        clean = clean.repeat(settings.head_repeats, 1)
        noise = torch.randn_like(clean)
        sigma = torch.sigmoid(torch.randn(len(clean)))
        uniform = torch.rand(len(clean)) < 0.3
        sigma = torch.where(uniform, torch.rand(len(clean)), sigma)[:, None]
        noisy = (1 - sigma) * clean + sigma * noise
        velocity = model.head.denoise(noisy, condition + model.head.embed_timestep(1000 * sigma[:, 0]))
        return F.mse_loss(velocity, noise - clean)


def build_optimizers(trainee: Trainee, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, which needs a third of AdamW's steps here; AdamW for everything else."""
    inside = ("blocks.", "layers.", "fc1", "fc2")
    matrices = [
        parameter
        for name, parameter in trainee.model.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and any(part in name for part in inside)
    ]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in trainee.trained if id(parameter) not in chosen]
    return [
        torch.optim.Muon(
            matrices,
            lr=settings.matrix_learning_rate,
            weight_decay=0.01,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def cosine_schedule(settings: Settings) -> Callable[[int], float]:
    """Return the factor of the learning rates: 200 steps of warm-up, then a cosine down to 2%."""
    return lambda step: min(1.0, (step + 1) / 200) * 0.5 * (1.02 + 0.98 * math.cos(math.pi * step / settings.steps))


def train_transformer(settings: Settings) -> None:
    """Train transformer and text encoder together; the weights that are kept are a running average."""
    torch.manual_seed(settings.seed)
    scenes = torch.load(settings.work / "scenes.pt", weights_only=True)
    texts, all_tokens = scenes["texts"], scenes["tokens"].float()
    model = NOVA.from_pretrained(settings.work)
    trainee = Trainee(model)
    average = [p.detach().clone() for p in trainee.trained]
    optimizers = build_optimizers(trainee, settings)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_schedule(settings)) for optimizer in optimizers]
    random = np.random.default_rng(settings.seed)
    log_file = (settings.output.parent / "nova-tiny-pretraining.csv").open("w", newline="")
    log = csv.writer(log_file)
    log.writerow(["step", "seconds", "loss", "kind", "verifier", "perfect"])
    started, recent = time.perf_counter(), []
    for step in range(1, settings.steps + 1):
        rows = random.integers(len(texts), size=settings.batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        draw, loss_sum = random.random(), 0.0
        for part, half in enumerate(np.split(rows, 2)):
            # Every step sees one early and one late mask step, which halves the noise of the drawn mask.
            unknown = max(1, round(math.cos(math.pi / 4 * (draw + part)) * CONFIG.num_tokens))
            order = torch.from_numpy(random.random((len(half), CONFIG.num_tokens))).argsort(dim=1)
            loss = trainee.loss([texts[row] for row in half], all_tokens[half], order[:, unknown:], settings)
            (0.5 * loss).backward()
            loss_sum += 0.5 * loss.item()
        nn.utils.clip_grad_norm_(trainee.trained, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        decay = min(settings.average, step / (step + 20))
        torch._foreach_lerp_(average, [p.detach() for p in trainee.trained], 1 - decay)
        recent.append(loss_sum)
        if step % 100 == 0:
            seconds, mean = time.perf_counter() - started, sum(recent) / len(recent)
            print(f"step {step} loss {mean:.4f} seconds {seconds:.0f}", flush=True)
            log.writerow([step, round(seconds), round(mean, 4), "", "", ""])
            recent.clear()
        if step % settings.evaluate_every == 0 or step == settings.steps:
            trained = [p.detach().clone() for p in trainee.trained]
            set_values(trainee.trained, average)
            save(trainee, settings)
            for kind, score, perfect in verifier_scores(settings):
                print(f"step {step} verifier {kind} {score:.3f} perfect {perfect:.3f}", flush=True)
                seconds = round(time.perf_counter() - started)
                log.writerow([step, seconds, "", kind, round(score, 4), round(perfect, 4)])
            set_values(trainee.trained, trained)
            log_file.flush()


def set_values(parameters: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into parameters."""
    with torch.no_grad():
        torch._foreach_copy_(parameters, values)


def save(trainee: Trainee, settings: Settings) -> None:
    """Write the trained parts into the working checkpoint."""
    model = trainee.model
    save_transformer(official_weights(model.policy, model.head), settings.work / "transformer")
    file = settings.work / "text_encoder" / "model.safetensors"
    trained = {f"model.{k}": v.detach().clone() for k, v in model.text_encoder.encoder.state_dict().items()}
    save_file({**load_file(file), **trained}, file, metadata={"format": "pt"})


@torch.no_grad()
def verifier_scores(settings: Settings, count: int = 192) -> list[tuple[str, float, float]]:
    """Score images of held-out prompts, by kind of prompt and in all: mean score, share that is perfect."""
    model = NOVA.from_pretrained(settings.work)
    sampling = SamplingConfig(mask_steps=8, denoising_steps=8, guidance_scale=1.0)
    records = prompts(count, seed=settings.seed, held_out=True)
    texts = [record["prompt"] for record in records]
    noise = SampleNoise(
        [stable_seed(i) for i in range(count)], CONFIG.num_tokens, CONFIG.token_channels, torch.device("cpu")
    )
    denoiser = TokenDenoiser(model.head, model.transition(8, 1.0, None), score_guided=False)
    latents = generate(model, model.policy, model.encode(texts), sampling, denoiser, noise)
    scores = ShapesReward()(model.decode(latents), texts, records)
    rows = []
    for kind in ["all", *sorted({record["task_type"] for record in records})]:
        chosen = torch.tensor([kind in ("all", record["task_type"]) for record in records])
        rows.append((kind, scores[chosen].mean().item(), (scores[chosen] > 0.95).float().mean().item()))
    return rows


def write_prompts(folder: Path, seed: int) -> None:
    """Write the prompt files of the embedded task: distinct prompts, none in both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, held_out, count in (("train", False, 4096), ("heldout", True, 1024)):
        drawn = {record["prompt"]: record for record in prompts(8 * count, seed, held_out)}
        records = list(drawn.values())[:count]
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(records)} prompts", flush=True)


def main() -> None:
    """Run the stages that are not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint to write")
    parser.add_argument("--work", type=Path, default=Path("runs/pretrain-tiny"), help="intermediate results")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="training steps of the transformer")
    arguments = parser.parse_args()
    settings = Settings(arguments.output, arguments.work, steps=arguments.steps)
    settings.work.mkdir(parents=True, exist_ok=True)
    stages = {
        "text_encoder": build_text_side,
        "vae": train_vae,
        "scenes.pt": encode_scenes,
        "transformer": assemble,
    }
    write_prompts(settings.output.parent / "prompts", settings.seed)
    for result, stage in stages.items():
        if not (settings.work / result).exists():
            stage(settings)
    train_transformer(settings)
    model = NOVA.from_pretrained(settings.work)
    model.save_pretrained(settings.output)


if __name__ == "__main__":
    main()
