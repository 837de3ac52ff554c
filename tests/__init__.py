"""Tests of margrpo."""
