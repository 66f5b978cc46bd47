"""Record every call into the scheduling core, and run the core again from the file.

The core is deterministic, so the calls alone say everything. `recorder` writes them, `replayer` makes them again and
compares what the core decides; traces and fitted cost models are drawn from a replay.
"""
