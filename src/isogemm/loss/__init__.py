"""Log-probabilities and cross-entropy of a language model's head, without logits in memory."""
