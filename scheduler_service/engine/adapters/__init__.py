"""LoRA adapters: their files, and the delivery of copies to each worker (`adapter_fetcher`)."""
