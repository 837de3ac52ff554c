"""Post-training of AR-diffusion hybrid image generators with MAR-GRPO (arXiv 2604.06966)."""

__version__ = "0.1.0"
