"""OpenAI's HTTP API.

This package contains the routes, finds the API key of each request, and prepares the gateway's input. The gateway (the
program smg) translates most of the HTTP calls into scheduler calls. The scheduler accepts or refuses requests.
"""
