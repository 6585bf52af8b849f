"""Continual learners, one file each."""
