"""The CPU half of pagewire: it owns every request, budget and block number, and plans each worker's steps."""
