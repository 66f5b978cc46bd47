"""HTTP as a protocol of the front ends: OpenAI's API, beside gRPC and in the same process."""
