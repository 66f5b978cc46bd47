"""LoRA adapters in a worker's memory."""
