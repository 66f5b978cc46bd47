"""Encodes the images of prompts, and keeps their embeddings."""
