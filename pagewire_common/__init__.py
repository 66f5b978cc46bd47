"""Parts of both services that are independent of inference: settings, logs, and the life of a gRPC server.

Nothing here knows about requests, blocks or models.
"""

import os

# gRPC's C core would print lines of its own. It reads this variable when grpc is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
