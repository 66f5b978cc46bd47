"""Images of JSON bodies: in base64, or at URLs of hosts that the operator allows."""
