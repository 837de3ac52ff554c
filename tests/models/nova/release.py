"""The condition that the published release trains with, put together from the package's own modules."""

import torch
from torch import Tensor

from margrpo.models.nova.layers import patchify
from margrpo.models.nova.policy import NOVAPolicy

PROMPTS = [
    "a photo of a car below a zebra",
    "two candles, a cow, four balloons, and three fish created a relaxing atmosphere",
]


def two_frame_context(policy: NOVAPolicy, prompt_embeds: Tensor, latents: Tensor) -> Tensor:
    """Show the video encoder the partial latents as a second frame, which its rollout does not.

    Args:
        policy: the policy or the reference.
        prompt_embeds: [B, length, token_dim].
        latents: [B, c, H, W], unknown tokens zero.

    Returns:
        context [B, 2 V, E].
    """
    patch_embed = policy.video_encoder.patch_embed
    second = patch_embed(patchify(latents, 2 * policy.config.patch))
    first = policy.mask_embed.bos_token.detach().expand_as(second)
    times = policy.video_pos_embed(2)
    frames = torch.cat([first + times[0] + policy.video_positions, second + times[1] + policy.video_positions], dim=1)
    return policy.encode_frames(frames, policy.text_embed(prompt_embeds))
