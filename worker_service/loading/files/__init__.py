"""Reads and checks the files of a checkpoint, with limits on their sizes."""
