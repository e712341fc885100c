"""Comparisons with what people would use instead: whole programs, in turns, the peers' versions in the output."""
