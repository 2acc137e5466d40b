"""A run's steps, the trainer's and any loop's: exchanged, accounted for, saved, stopped."""
