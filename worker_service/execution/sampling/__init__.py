"""From logits to tokens: edits, forms, sampling, log-probabilities, pooling and transcripts."""
