"""Vectors in the format in which the server sends them."""

import sys
from array import array
from dataclasses import dataclass, field

from pagewire.v1 import inference_service_pb2 as pb


@dataclass(slots=True)
class Embedding:
    """The vectors of one text: one, or with POOLING_ALL one for each token."""

    data: bytes = b""
    """All vectors, in little-endian float32, as for numpy.frombuffer(data, "<f4")."""
    dimensions: int = 0
    usage: pb.Usage = field(default_factory=pb.Usage)
    model_fingerprint: str = ""
    """Only vectors with equal fingerprints can be compared."""

    @property
    def vector(self) -> "array[float]":
        return self._numbers(self.data[: 4 * self.dimensions])

    @property
    def vectors(self) -> "list[array[float]]":
        size = 4 * self.dimensions
        return [self._numbers(self.data[start : start + size]) for start in range(0, len(self.data), size)]

    def add(self, response: pb.EmbedResponse) -> None:
        self.data += response.vectors
        self.dimensions = response.dimensions
        self.model_fingerprint = response.model_fingerprint
        if response.HasField("usage"):
            self.usage = response.usage

    @staticmethod
    def _numbers(data: bytes) -> "array[float]":
        numbers = array("f", data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers
