"""Plans each step of one worker and applies its answers. Other packages decide the order of requests, the blocks of
sequences, and the worker of each request."""
