"""Requests in flight: admission, outputs, and calls beside the steps."""
