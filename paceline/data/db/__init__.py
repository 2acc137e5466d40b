"""Image databases: LMDB, LevelDB and minidb, their record formats; create, convert, inspect."""
