"""LoRA adapters: their files, and the copies on each worker (`adapter_fetcher`)."""
