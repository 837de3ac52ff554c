"""Callbacks that watch a run: stability, sample grids, the summary, written images."""
