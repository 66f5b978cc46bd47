"""Parts of both services that have nothing to do with their purpose: settings, logs, and the life of a gRPC server.

Nothing here knows about requests, blocks or models.
"""

import os

# gRPC's C core would write lines of its own beside our sentences. It reads this when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
