"""NOVA (arXiv 2412.14169): architecture, checkpoint layout and mask schedule."""

from margrpo.models.nova.model import NOVA

from_pretrained = NOVA.from_pretrained

__all__ = ["NOVA", "from_pretrained"]
