"""Tables of a run's components by its configuration's words; that of `--sync` is in `exchange`.

Other tables are beside their classes: codecs, stores, launchers, image formats, databases.
"""
