"""Messages of Envoy's external processing and of gRPC's health checks: the fields that are used.

On the wire a field is identified by its number, and unknown ones are skipped, so this table
replaces hundreds of generated files. Numbers are those of
`envoy/service/ext_proc/v3/external_processor.proto`, `envoy/config/core/v3/base.proto` and
`grpc/health/v1/health.proto`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf import struct_pb2 as _  # noqa: F401 - puts Struct into the pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message_factory import GetMessages

PROCESS = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")
HEALTH_CHECK = ("grpc.health.v1.Health", "Check")
#: `ProcessingMode.BodySendMode`.
BUFFERED, BUFFERED_PARTIAL = 2, 3
#: `HeaderValueOption.HeaderAppendAction`: no client may set the endpoint itself.
OVERWRITE_IF_EXISTS_OR_ADD = 2
#: `HealthCheckResponse.ServingStatus`.
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

_PACKAGE = "quire.ext_proc"
_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int": FieldDescriptorProto.TYPE_INT32,
}
#: Message -> field -> its number and type; "*" before the type: repeated.
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    # From Envoy to the picker.
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "*HeaderValue")},
    "FilterMetadata": {"key": (1, "string"), "value": (2, "Struct")},
    "Metadata": {"filter_metadata": (1, "*FilterMetadata")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    # From the picker to Envoy.
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int")},
    "HeaderMutation": {"set_headers": (1, "*HeaderValueOption")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
    "HealthCheckRequest": {"service": (1, "string")},
    "HealthCheckResponse": {"status": (1, "int")},
}


def _build() -> dict[str, Any]:
    file = FileDescriptorProto(name="quire/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append("google/protobuf/struct.proto")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, (number, text) in fields.items():
            kind = text.removeprefix("*")
            field = message.field.add(name=field_name, number=number)
            field.label = (
                FieldDescriptorProto.LABEL_OPTIONAL
                if kind == text
                else FieldDescriptorProto.LABEL_REPEATED
            )
            field.type = _SCALARS.get(kind, FieldDescriptorProto.TYPE_MESSAGE)
            if kind == "Struct":
                field.type_name = ".google.protobuf.Struct"
            elif kind not in _SCALARS:
                field.type_name = f".{_PACKAGE}.{kind}"
    return GetMessages([file], pool=descriptor_pool.Default())


#: Message name -> its class.
CLASSES = {name.removeprefix(f"{_PACKAGE}."): cls for name, cls in _build().items()}
ProcessingRequest = CLASSES["ProcessingRequest"]
ProcessingResponse = CLASSES["ProcessingResponse"]
HealthCheckRequest = CLASSES["HealthCheckRequest"]
HealthCheckResponse = CLASSES["HealthCheckResponse"]
