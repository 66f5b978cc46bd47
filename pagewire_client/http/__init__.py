"""OpenAI's HTTP API: which routes there are, whose a request is, and what the gateway is given, which does most of the
work. What is asked for is decided by the scheduler."""
