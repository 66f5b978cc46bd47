"""Products with weights in fewer bits, and those of experts, in eager torch."""
