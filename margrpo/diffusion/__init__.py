"""Gaussian kernels of the diffusion heads' samplers."""
