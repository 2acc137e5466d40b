"""The index file beside a database, which makes opening it quick."""
