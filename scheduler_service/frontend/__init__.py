"""One client's request: checked, tokenized, detokenized and streamed, in separate processes.

A front end asks the engine for a place and sends it tokens; the engine decides when and where the request runs.
"""
