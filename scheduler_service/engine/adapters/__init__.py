"""LoRA adapters: their files, and the copies that workers fetch."""
