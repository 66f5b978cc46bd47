"""Guesses at how outputs go on, which the next step verifies. A guess that is wrong costs time, never a token."""
