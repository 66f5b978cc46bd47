"""Parts of both services that are independent of inference: settings, logs, and the start and stop of a gRPC server.

This package has no knowledge of requests, blocks or models.
"""

import os

# Without this variable gRPC's C core would print log lines to stderr. The C core reads the variable when grpc is first
# imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
