"""Drafts by a draft model, or by a head that reads the target model's hidden states."""
