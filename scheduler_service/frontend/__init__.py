"""Front ends: processes that check, tokenize, detokenize and stream the requests of clients."""
