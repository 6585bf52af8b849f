"""Few-shot learning: N-way K-shot tasks, meta-training, evaluation."""
