"""OpenAI's HTTP API.

This package contains the routes, finds the API key of each request, and prepares the gateway's input. The gateway does
most of the work. The scheduler accepts or refuses requests.
"""
