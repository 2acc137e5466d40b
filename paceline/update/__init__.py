"""What changes parameters: optimizers by bucket or by shard, running statistics, batch norm."""
