"""Outer steps: the same update of weights and mask, by a readable path or a fast one."""
