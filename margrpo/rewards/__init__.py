"""Scorers of images, one a file, and their combination."""
