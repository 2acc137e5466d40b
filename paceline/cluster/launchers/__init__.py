"""Other people's launchers (torchrun, mpirun, Slurm's srun): readers of the variables they set."""
