"""Continual learning: one network, a stream of tasks, each example seen once, and a small memory of the past."""
