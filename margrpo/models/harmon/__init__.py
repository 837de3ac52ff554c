"""Harmon (arXiv 2503.21979): architecture, checkpoint layout and mask schedule."""

from margrpo.models.harmon.model import Harmon

from_pretrained = Harmon.from_pretrained

__all__ = ["Harmon", "from_pretrained"]
