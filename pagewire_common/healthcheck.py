"""Exit with status 0 if a server reports SERVING: python -m pagewire_common.healthcheck HOST:PORT [SERVICE].

Uses TLS if PAGEWIRE_TLS is set; the certificate must then be valid for HOST.
"""

import asyncio
import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire_common.connection.tls import TlsFolder, secure_channel
from pagewire_common.start_error import StartError

SECONDS = 3.0


async def is_serving(target: str, service: str, tls: TlsFolder | None) -> bool:
    """Raises grpc.aio.AioRpcError."""
    async with secure_channel(target, tls) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    target, service = [*sys.argv[1:], ""][:2]
    folder = os.environ.get("PAGEWIRE_TLS")
    try:
        serving = asyncio.run(is_serving(target, service, TlsFolder(Path(folder)) if folder else None))
    except grpc.RpcError as error:
        sys.exit(str(error.code()))
    except StartError as error:
        sys.exit(str(error))
    sys.exit(not serving)


if __name__ == "__main__":
    main()
