"""Drafts of the next tokens, which the next step verifies. A wrong draft token costs time, never a token.

`execution.steps.running_step` accepts drafts.
"""
