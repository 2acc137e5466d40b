"""The synchronization methods: each is a composition of an exchange, an updater and a rule."""
