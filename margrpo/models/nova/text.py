"""NOVA's frozen text side: tokenizer, Phi encoder and the null prompt fill a fixed number of rows per prompt."""

import torch
from torch import Tensor, nn
from transformers import PhiModel, PreTrainedTokenizerBase


class TextEncoder(nn.Module):
    """Turns prompts into the states of their tokens.

    Args:
        tokenizer: tokenizer of the checkpoint; adds no special tokens.
        encoder: Phi without its language-model head.
        length: rows per prompt; longer prompts are truncated.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, encoder: PhiModel, length: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.length = length

    def forward(self, prompts: list[str], null_rows: Tensor) -> Tensor:
        """Encode P prompts to [P, length, token_dim].

        The first rows hold the states of the real tokens, the others the rows of the null prompt,
        `null_rows` [>= length, token_dim]. Attention is causal, so padding never reaches a real token.
        """
        token_ids = self._token_ids(prompts)
        device = null_rows.device
        lengths = torch.tensor([min(len(ids), self.length) for ids in token_ids], device=device)
        embeds = null_rows[: self.length].expand(len(prompts), -1, -1)
        longest = int(lengths.max())
        if longest == 0:
            return embeds
        # Any id will do as padding: not every Phi tokenizer names one.
        rows = [(ids + [0] * longest)[:longest] for ids in token_ids]
        states = self.encoder(torch.tensor(rows, device=device), use_cache=False).last_hidden_state
        is_real = torch.arange(longest, device=device) < lengths[:, None]
        head_rows = torch.where(is_real[..., None], states.to(embeds.dtype), embeds[:, :longest])
        return torch.cat([head_rows, embeds[:, longest:]], dim=1)

    def count_truncated(self, prompts: list[str]) -> int:
        """Count the prompts that are longer than `length` tokens."""
        return sum(len(ids) > self.length for ids in self._token_ids(prompts))

    def _token_ids(self, prompts: list[str]) -> list[list[int]]:
        return self.tokenizer(prompts, add_special_tokens=False).input_ids
