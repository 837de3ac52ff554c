"""Rollouts: prompts in, grouped samples with the decisions that are trained out."""
