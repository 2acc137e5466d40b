"""Last import of multiprocessing's fork server: the collector leaves alone what was imported.

Otherwise each fork's collector goes through torch's million objects, and copies their pages.
"""

import gc

gc.collect()
gc.freeze()
gc.enable()
