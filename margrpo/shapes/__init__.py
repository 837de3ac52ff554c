"""The embedded task: scenes of coloured shapes, their renderer, and an exact verifier."""
