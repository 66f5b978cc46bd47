"""Tests of the planning core, in the rooms of the code; in this folder are its tests as a whole, and their helpers."""
