"""Updates of parameters: optimizers by bucket or shard, running statistics, batch norm."""
