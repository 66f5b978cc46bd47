"""One client's request: checked, tokenized, turned into text and streamed, in processes of their own.

A front end asks the engine for a place and gives it tokens; when the request runs, and where, is left to the engine.
"""
