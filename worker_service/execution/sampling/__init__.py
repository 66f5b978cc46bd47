"""From logits to tokens: edits, forms, draws, log-probabilities, poolings and transcripts."""
