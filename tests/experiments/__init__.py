"""Tests of the scripts in experiments/."""
