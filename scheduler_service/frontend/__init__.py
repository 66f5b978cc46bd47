"""Front ends: processes that check, tokenize, detokenize and stream the requests of clients.

A front end asks the engine to admit a request and sends the prompt's tokens. The engine decides when and on which
worker the request runs.
"""
