"""OpenAI's HTTP API.

This package has the routes, maps each request to its API key, and prepares the gateway's input. The gateway does most
of the work; the scheduler accepts or refuses requests.
"""
