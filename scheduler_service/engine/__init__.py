"""The fleet, in one process: requests in flight, what each worker does next, and what front ends are told of it.

It plans nothing itself (`core` does), and knows neither text nor clients (`frontend` does).
"""
