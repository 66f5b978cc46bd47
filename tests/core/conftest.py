"""Tests of the planning core as a whole, and their helpers."""
