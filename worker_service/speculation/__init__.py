"""Drafts tokens, which the next step verifies. A wrong draft costs time, but does not change the output."""
