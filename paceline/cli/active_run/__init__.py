"""Commands on a run that is active: stop it, or show how it stands."""
