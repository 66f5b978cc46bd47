"""Vectors in the format in which the server sends them."""

import sys
from array import array
from dataclasses import dataclass, field

from pagewire.v1 import inference_service_pb2 as pb


@dataclass(slots=True)
class Embedding:
    """The vectors of one text. With POOLING_ALL a text has a vector for each token. With any other pooling a text has a
    single vector.
    """

    data: bytes = b""
    """The bytes of all vectors, one vector after the other, in little-endian float32. The call numpy.frombuffer(data,
    "<f4") reads the vectors.
    """
    dimensions: int = 0
    usage: pb.Usage = field(default_factory=pb.Usage)
    model_fingerprint: str = ""
    """Identifies the model. Only vectors with equal fingerprints can be compared."""

    @property
    def vector(self) -> "array[float]":
        """The text's first vector. With any pooling but POOLING_ALL, the text has only this vector."""
        return self._numbers(self.data[: 4 * self.dimensions])

    @property
    def vectors(self) -> "list[array[float]]":
        """All vectors of the text."""
        size = 4 * self.dimensions
        return [self._numbers(self.data[start : start + size]) for start in range(0, len(self.data), size)]

    def add(self, response: pb.EmbedResponse) -> None:
        """Append the vectors of the next message for the same text."""
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
