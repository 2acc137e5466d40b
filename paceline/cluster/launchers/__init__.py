"""Readers of the variables that launchers set: torchrun, mpirun, Slurm's srun."""
