"""Drafts tokens, which the next step verifies. A wrong draft costs time, but does not change the output.

The file `execution/steps/running_step.py` decides which drafts are accepted.
"""
