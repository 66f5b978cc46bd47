"""Tokens from the engine, until they are messages of a client's stream.

`request` says what was asked for. Tokens arrive at its `request_state`: alone, or as `gained` with whatever else there
is. Text is made of them, `token_times` counts them, and they become deltas of a stream. `streams` merges deltas until
the client reads, and `turns` says which stream may write. Outputs of a search are `whole_output`s, chosen when all have
ended.
"""
