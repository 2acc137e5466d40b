"""What other launchers tell their processes: torchrun, mpirun, Slurm's srun."""
