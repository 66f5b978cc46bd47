"""The systems that benchmarks start and measure: pagewire's services and their peers."""
