"""The synchronization methods: one composition of exchange and updater each."""
