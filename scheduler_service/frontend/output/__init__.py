"""Converts tokens from the engine to messages of a client's stream.

`request` describes a checked request. `request_state` receives the engine's tokens, alone or with other data
(`Gained`). `request_state` also decodes tokens to text and adds deltas to the client's stream. `token_times` counts
tokens. `streams` merges the deltas of a stream until the client reads them, and `turns` decides which stream may write.
With best_of and beam search, the outputs are sent only after all of them have ended (`whole_output`).
"""
