"""Harmon's prompts: the published template, tokenised and padded on the right."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2TokenizerFast

from margrpo.models.checkpoint import CheckpointError

OPENING = "<|im_start|>user\nGenerate an image"
CLOSING = "<|im_end|>\n<|im_start|>assistant\n"


class PromptTokenizer:
    """Turns prompts into token ids.

    Args:
        tokenizer: of the checkpoint.
        length: longest template in tokens; a longer prompt is truncated inside it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.tokenizer = tokenizer
        # The closing starts with a special token, so that it can be tokenised apart.
        self.closing = self._ids([CLOSING])[0]
        self.limit = length - len(self.closing)

    def conditional(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Tokenise P prompts in the template; returns ids int64 [P, L], and int64 [P, 1] how many of each are real."""
        return self._padded([ids[: self.limit] + self.closing for ids in self._opened(prompts)])

    def unconditional(self) -> tuple[Tensor, Tensor]:
        """Tokenise the template that asks for any image; returns ids [1, L] and their number [1, 1]."""
        return self._padded([self._ids([f"{OPENING}."])[0] + self.closing])

    def count_truncated(self, prompts: list[str]) -> int:
        """Count the prompts that do not fit."""
        return sum(len(ids) > self.limit for ids in self._opened(prompts))

    def _opened(self, prompts: list[str]) -> list[list[int]]:
        return self._ids([f"{OPENING}: {prompt}" for prompt in prompts])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False).input_ids

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        lengths = [len(row) for row in rows]
        padding = [self.tokenizer.pad_token_id] * max(lengths)
        ids = [(row + padding)[: len(padding)] for row in rows]
        return torch.tensor(ids), torch.tensor(lengths)[:, None]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load Qwen2's tokenizer; raises CheckpointError when files are missing or cannot be read."""
    # Without them transformers would make a tokenizer that knows no word.
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json and no vocab.json")
    try:
        return Qwen2TokenizerFast.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: tokenizer cannot be loaded: {error}") from error
