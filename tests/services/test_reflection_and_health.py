import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from pagewire.v1 import (
    admin_service_pb2,
    engine_service_pb2,
    inference_service_pb2,
    recording_pb2,
    worker_service_pb2,
)
from pagewire.v1.admin_service_pb2 import GetClusterStateRequest
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire_client import LocalServer


class NewDatabase(ProtoReflectionDescriptorDatabase):
    """Asks grpc.reflection.v1, whose messages are those of v1alpha under another name."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)
        self._stub.ServerReflectionInfo = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )


REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@pytest.mark.parametrize("database_of", [NewDatabase, ProtoReflectionDescriptorDatabase])
def test_a_client_without_our_protos_finds_and_calls_generate(
    tiny_server: LocalServer, database_of: type[ProtoReflectionDescriptorDatabase]
) -> None:
    """What grpcurl does: services, messages and field types all come from the server."""
    with grpc.insecure_channel(tiny_server.target) as channel:
        database = database_of(channel)
        known = {"pagewire.v1.InferenceService", "grpc.health.v1.Health", *REFLECTION}
        assert set(database.get_services()) == known
        pool = descriptor_pool.DescriptorPool(database)
        for name in REFLECTION:
            (reflecting,) = pool.FindServiceByName(name).methods
            assert reflecting.input_type.full_name == name.replace("ServerReflection", "ServerReflectionRequest")
        method = pool.FindServiceByName("pagewire.v1.InferenceService").FindMethodByName("Generate")
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        assert request_type.DESCRIPTOR.file.pool is pool
        call = channel.unary_stream(
            "/pagewire.v1.InferenceService/Generate",
            request_serializer=request_type.SerializeToString,
            response_deserializer=response_type.FromString,
        )
        responses = list(call(request_type(text="hello", sampling={"max_tokens": 4, "ignore_eos": True}), timeout=30))
    assert sum(len(response.token_ids) for response in responses) == 4
    assert responses[-1].usage.output_tokens == 4


@pytest.mark.parametrize("service", ["", "pagewire.v1.InferenceService"])
def test_health_is_reported_for_every_service_and_overall(tiny_server: LocalServer, service: str) -> None:
    with grpc.insecure_channel(tiny_server.target) as channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_administration_has_a_port_of_its_own(tiny_server: LocalServer) -> None:
    with grpc.insecure_channel(tiny_server.target) as channel:
        assert "pagewire.v1.AdminService" not in ProtoReflectionDescriptorDatabase(channel).get_services()
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())
    with grpc.insecure_channel(tiny_server.admin_target) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert "pagewire.v1.AdminService" in services
        assert "pagewire.v1.InferenceService" not in services
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_stubs_for_other_languages_need_no_flags() -> None:
    """protoc's plugins for Go refuse a file that names no package."""
    for file in (admin_service_pb2, engine_service_pb2, inference_service_pb2, worker_service_pb2, recording_pb2):
        for described in (file.DESCRIPTOR, *file.DESCRIPTOR.dependencies):
            options = described.GetOptions()
            assert options.go_package == "pagewire/v1;pagewirev1"
            assert (options.java_package, options.java_multiple_files) == ("pagewire.v1", True)
            assert options.csharp_namespace == "Pagewire.V1"
