"""Converts tokens from the engine to messages of a client's stream.

`request` describes a checked request. The engine's tokens arrive at `request_state`, alone or with other data
(`gained`). `request_state` decodes the tokens to text and adds deltas to the stream; `token_times` counts the tokens.
`streams` merges deltas until the client reads, and `turns` decides which stream may write. The outputs of best_of and
beam search are sent as a `whole_output`, after all outputs have ended.
"""
