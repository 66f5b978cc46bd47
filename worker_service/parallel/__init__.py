"""One worker on several devices: each of N processes, its ranks, holds a part of every weight and of every KV block.

The first rank serves gRPC and repeats every step to the others; all compute it alike, on their parts, and add up what
they found. A rank that dies takes the whole worker with it.
"""
