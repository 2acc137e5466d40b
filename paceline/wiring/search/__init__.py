"""The search for the checkpoint from which a run resumes, on all its machines."""
