"""Drafts the next tokens, which the next step verifies. A wrong draft costs time, but changes no token.

The file `execution/steps/running_step.py` decides which drafts are accepted.
"""
