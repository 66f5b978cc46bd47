"""LoRA adapters: their files, and the copies that each worker is sent (`adapter_fetcher`)."""
