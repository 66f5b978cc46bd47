"""The fleet, in one process: requests in flight, each worker's next step, and the messages to front ends.

The engine does not plan steps (`core` does), and knows neither text nor clients (`frontend` does).
"""
