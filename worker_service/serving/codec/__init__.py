"""Converts between protobuf and the worker's types; no other folder uses both."""
