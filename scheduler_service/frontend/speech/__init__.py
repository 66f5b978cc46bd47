"""Converts sound files to features for the encoder of a speech model, and the tokens of the model to transcripts."""
