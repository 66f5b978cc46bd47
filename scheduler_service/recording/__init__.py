"""Records every call into the scheduling core, and runs the core again from the file.

The core is deterministic, so its calls are a complete record. `recorder` writes them, and `replayer` repeats them and
compares the core's decisions. Traces and fitted cost models are made from a replay.
"""
