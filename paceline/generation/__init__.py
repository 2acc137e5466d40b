"""What lives as long as one generation of the world, and the run that has the present one."""
