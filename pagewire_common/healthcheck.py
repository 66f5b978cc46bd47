"""Exit 0 when the server at HOST:PORT reports SERVING: python -m pagewire_common.healthcheck HOST:PORT."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main() -> None:
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=3)
        except grpc.RpcError as error:
            sys.exit(str(error.code()))
    sys.exit(response.status != health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    main()
