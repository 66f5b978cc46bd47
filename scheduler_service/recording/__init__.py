"""Records every call into the scheduling core, and runs the core again from the file.

The core is deterministic, so the recorded calls determine all its decisions. `recorder` writes the calls. `replayer`
repeats the calls and compares the core's decisions. Traces and fitted cost models are computed from a replay.
"""
