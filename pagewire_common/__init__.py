"""Parts of both services that know nothing of requests, blocks or models."""

import os

# gRPC's C core reads this variable when grpc is first imported, and would otherwise print to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
