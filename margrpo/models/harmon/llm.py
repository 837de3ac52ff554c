"""Harmon's frozen language model: Qwen2 between the policy's encoder and decoder, after the text of the prompt."""

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen2Config, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding


class LanguageModel(nn.Module):
    """Qwen2 without its output layer, and the projections into and out of it.

    Args:
        config: sizes.
        width: of the policy's encoder.
    """

    def __init__(self, config: Qwen2Config, width: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        # Under the names of the causal model that checkpoints hold.
        self.llm = nn.ModuleDict({"model": Qwen2Model(config)})
        self.proj_in = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.proj_out = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, width))

    def build_tables(self) -> None:
        """Compute the rotary frequencies again after weights were assigned to a model made on the meta device."""
        model = self.llm["model"]
        model.rotary_emb = Qwen2RotaryEmbedding(config=model.config)

    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Run the text of P prompts.

        Padding is on the right, and attention is causal: it never reaches a real token.

        Args:
            token_ids: int64 [P, L].

        Returns:
            keys and values, each [P, L, layers, heads, head width].
        """
        cache = DynamicCache()
        self.llm["model"](token_ids, None, None, cache, use_cache=True)
        keys = torch.stack([layer.keys for layer in cache.layers], dim=1)
        values = torch.stack([layer.values for layer in cache.layers], dim=1)
        return keys.movedim(3, 1), values.movedim(3, 1)

    def forward(self, x: Tensor, slots: int, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        """Add to encoded tokens what the language model makes of them after the text.

        The image tokens come first and the buffer last; attention is causal, and positions go on where the text ends.

        Args:
            x: [B, slots + K, width], the buffer first.
            slots: size of the buffer.
            keys: of `prefill`, one row per image.
            values: of `prefill`, one row per image.
            length: int64 [B, 1], real tokens of each text.

        Returns:
            [B, slots + K, width], the buffer first.
        """
        count = x.shape[1]
        cache = DynamicCache()
        for layer, (layer_keys, layer_values) in enumerate(zip(keys.unbind(2), values.unbind(2), strict=True)):
            cache.update(layer_keys.transpose(1, 2), layer_values.transpose(1, 2), layer)
        is_text = torch.arange(keys.shape[1], device=x.device) < length
        visible = torch.cat([is_text, is_text.new_ones(len(x), count)], dim=1)
        positions = length + torch.arange(count, device=x.device)
        tokens = self.proj_in(x).roll(-slots, dims=1)
        states = self.llm["model"](None, visible.long(), positions, cache, tokens, use_cache=True).last_hidden_state
        return x + self.proj_out(states.roll(slots, dims=1))
