"""Drafts of how outputs go on, which the next step verifies. A draft token that is wrong costs time, never a token."""
