"""Tests of the transitions."""
