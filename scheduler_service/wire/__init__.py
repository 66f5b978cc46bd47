"""Between the core's types and messages, of workers, front ends and recordings alike: pure, and no connection."""
