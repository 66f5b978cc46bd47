"""Requests in flight: admission, their outputs, calls beside the steps."""
