"""What a run costs: the processor time, GPU time and energy of its processes and machines."""
