"""One client's request: checked, tokenized, detokenized and streamed, in separate processes.

A front end asks the engine to admit a request and sends the prompt's tokens. The engine decides when and on which
worker the request runs.
"""
