"""What one session has said so far: the steps, and the sequences that they leave behind. It computes nothing."""
