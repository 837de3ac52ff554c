"""Tests of the objective."""
