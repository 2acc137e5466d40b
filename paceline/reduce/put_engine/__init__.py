"""The put engine: a reduce-scatter and an all-gather by one-sided puts and notifications."""
