"""Recovery of a rank: it goes back to a state that others have, and enters the next generation."""
