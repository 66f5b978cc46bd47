"""Server reflection, as `grpc.reflection.v1` and as `grpc.reflection.v1alpha`.

grpcio-reflection 1.85 has only v1alpha, whose messages differ only in their protobuf package.
"""

from collections.abc import Sequence
from functools import cache

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1ALPHA = reflection.SERVICE_NAME
_V1 = "grpc.reflection.v1.ServerReflection"


def add_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*service_names, _V1, _V1ALPHA))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (_V1, _V1ALPHA):
        methods = {"ServerReflectionInfo": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


@cache
def _describe_v1() -> None:
    """Add the file of v1 to the descriptor pool, once in a process."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.options.ClearField("deprecated")
    text = text_format.MessageToString(file).replace("v1alpha", "v1")
    descriptor_pool.Default().AddSerializedFile(
        text_format.Parse(text, descriptor_pb2.FileDescriptorProto()).SerializeToString()
    )
