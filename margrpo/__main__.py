"""Runs the command line as `python -m margrpo`."""

from margrpo.cli import main

main()
